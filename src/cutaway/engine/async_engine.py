"""Many asyncio callers, one engine: each gets an iterator over its own outputs.

The engine answers step by step, for all requests at once. One task takes each step's outputs from the channel and lays
every output into the slot of its request; a caller waits for its slot alone. A slot holds one output: what comes before
the caller has looked is merged into it, so a slow reader costs one list of ids and never holds up the others.

Invariant: a request is aborted once if its iterator is closed (or its task cancelled) before its finish has arrived, and
not at all otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Protocol

from cutaway.core.request import FinishReason, Output, Request


class Channel(Protocol):
    """The way to an engine: in this process, or through a socket to its own."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def add(self, request: Request) -> None: ...
    def abort(self, ids: Sequence[int]) -> None: ...
    async def receive(self) -> list[Output]: ...


class Slot:
    """What one caller has not taken yet."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        self._output: Output | None = None

    def put(self, output: Output) -> None:
        if self._output is None:
            logprobs = None if output.logprobs is None else list(output.logprobs)
            self._output = replace(output, token_ids=list(output.token_ids), logprobs=logprobs)
        else:
            self._merge(self._output, output)
        self._arrived.set()

    @staticmethod
    def _merge(held: Output, output: Output) -> None:
        held.token_ids += output.token_ids
        if output.logprobs:
            held.logprobs = (held.logprobs or []) + output.logprobs
        held.finish_reason, held.stop_reason, held.error = output.finish_reason, output.stop_reason, output.error
        held.num_cached = max(held.num_cached, output.num_cached)
        held.queue_seconds = max(held.queue_seconds, output.queue_seconds)

    async def take(self) -> Output:
        await self._arrived.wait()
        self._arrived.clear()
        output, self._output = self._output, None
        assert output is not None
        return output


def is_last(output: Output) -> bool:
    return output.finish_reason is not None or output.error is not None


class AsyncEngine:
    """Requests in, iterators of outputs out.

    Example:
        >>> engine = AsyncEngine(channel)                    # doctest: +SKIP
        >>> await engine.start()                             # doctest: +SKIP
        >>> async for output in engine.generate(request):    # doctest: +SKIP
        ...     print(output.token_ids)
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._slots: dict[int, Slot] = {}  # of requests whose last output has not arrived
        self._demultiplexer: asyncio.Task[None] | None = None

    @property
    def num_active(self) -> int:
        """Requests whose last output has not arrived yet."""
        return len(self._slots)

    async def start(self) -> None:
        """Returns when the engine takes requests; raises what the channel raises when it cannot start."""
        await self._channel.start()
        self._demultiplexer = asyncio.create_task(self._demultiplex())

    async def stop(self) -> None:
        """Ends the engine. Callers that still wait get an output with `error`."""
        try:
            await self._channel.stop()
        finally:
            if self._demultiplexer is not None:
                self._demultiplexer.cancel()
                await asyncio.gather(self._demultiplexer, return_exceptions=True)
            self._fail("the engine was stopped")

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        """Yields what each step gave the request, the last with `finish_reason`. Closing the iterator aborts.

        A request that fails on its way (the engine died, its logits were not finite) yields one last output with
        `error`. Raises ValueError for an id that is running already, and EngineDied while there is no engine at all.
        """
        if request.id in self._slots:
            raise ValueError(f"request {request.id} is running already")
        self._channel.add(request)
        slot = self._slots[request.id] = Slot()
        try:
            output = await slot.take()
            while not is_last(output):
                yield output
                output = await slot.take()
            yield output
        finally:
            if self._slots.get(request.id) is slot:
                del self._slots[request.id]
                self._channel.abort([request.id])

    async def _demultiplex(self) -> None:
        try:
            while True:
                for output in await self._channel.receive():
                    self._put(output)
        except Exception as error:  # the channel is gone for good: everybody who waits has to hear of it
            self._fail(str(error) or type(error).__name__)

    def _put(self, output: Output) -> None:
        slot = self._slots.get(output.id)
        if slot is None:
            return  # aborted while this was on its way
        if is_last(output):
            del self._slots[output.id]
        slot.put(output)

    def _fail(self, line: str) -> None:
        for id in list(self._slots):
            self._put(Output(id, [], finish_reason=FinishReason.ERROR, error=line))
