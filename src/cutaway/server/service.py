"""One running server: the engine, its front, the numbers kept, and the life of each answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cutaway.core.errors import CutawayError, EngineDied
from cutaway.core.request import FinishReason, Output, Request, SamplingParams
from cutaway.engine.faults import Faults, find
from cutaway.engine.parts import AsyncEngineLike, Channel, MetricsLike, PartFault, Parts
from cutaway.server.errors import EngineFault, Unavailable, log
from cutaway.server.responses import DeltaLike, TokenTexts

T = TypeVar("T")


class StreamLike(Protocol):
    def push(self, output: Output) -> DeltaLike: ...


class FrontLike(Protocol):
    """What the server asks of `engine.front.Front`."""

    @property
    def model_name(self) -> str: ...
    @property
    def window(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def tokenizer(self) -> TokenTexts: ...
    def chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> Request: ...
    def complete(self, prompt: str | list[int], params: SamplingParams) -> Request: ...
    def stream(self, request: Request) -> StreamLike: ...


class ChannelLike(Protocol):
    """What the server asks of a channel. state: starting, ready, restarting, failed, stopping or stopped; ready: the
    engine's figures (`engine.process.build`); failure: why it ended last; stats: `engine.engine.Stats` of its last step."""

    @property
    def state(self) -> str: ...
    @property
    def ready(self) -> dict[str, Any]: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def stats(self) -> Any: ...


class Metered:
    """A channel that tells part 16 of every step on its way to part 15. `timed`: it takes the step's own `seconds`, too."""

    def __init__(self, channel: Channel, figures: ChannelLike, metrics: MetricsLike, timed: bool = False):
        self._channel, self._figures, self._metrics, self._timed = channel, figures, metrics, timed
        self._step = self._preemptions = 0

    async def start(self) -> None:
        await self._channel.start()

    async def stop(self) -> None:
        await self._channel.stop()

    def add(self, request: Request) -> None:
        self._channel.add(request)

    def abort(self, ids: Sequence[int]) -> None:
        self._channel.abort(ids)

    async def receive(self) -> list[Output]:
        outputs = await self._channel.receive()
        stats = self._figures.stats
        if stats is not None and stats.step != self._step:
            before = self._preemptions if stats.step > self._step else 0  # a restarted engine counts from nought
            seconds = {"seconds": stats.step_seconds} if self._timed else {}
            self._metrics.step(time.monotonic(), stats.used, stats.total, stats.rows, stats.preemptions - before, **seconds)
            self._step, self._preemptions = stats.step, stats.preemptions
        return outputs


class GuardedMetrics:
    """Part 16. Where it is somebody's, its first fault is logged, and the engine's own counts from there: no request fails
    because it could not be counted."""

    def __init__(self, parts: Parts):
        self._parts = parts
        self._metrics = parts.get("metrics").Metrics()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return getattr(self._metrics, name)(*args, **kwargs)
            except Exception as error:
                fault = find(self._parts, error)
                if fault is None:
                    raise
            log.warning("%s; the engine's own metrics count from now on", fault)
            self._parts.leave(fault)
            self._metrics = self._parts.get("metrics").Metrics()
            return getattr(self._metrics, name)(*args, **kwargs)

        return call


@dataclass(slots=True)
class Service:
    """What the routes share. `closing` is set when the server begins to stop."""

    engine: AsyncEngineLike
    front: FrontLike
    channel: ChannelLike
    parts: Parts
    metrics: MetricsLike
    api_key: str | None = None
    version: str = ""
    started: float = field(default_factory=time.time)
    created: int = field(default_factory=lambda: int(time.time()))
    closing: bool = False
    running: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    faults: Faults = field(init=False)

    def __post_init__(self) -> None:
        self.faults = Faults(self.parts.overrides)

    @property
    def up(self) -> bool:
        """Whether the engine takes requests."""
        return not self.closing and self.channel.state == "ready"

    def need_open(self) -> None:
        """Raises what a request gets once the server stops. While the engine is being restarted requests wait for it."""
        if self.closing:
            raise Unavailable("the server is shutting down")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Templates and tokenizing off the event loop: a long prompt must not hold up other streams."""
        return await asyncio.get_running_loop().run_in_executor(None, work)

    async def follow(self, request: Request) -> AsyncIterator[DeltaLike]:
        """The deltas of a request, the last with a finish_reason. Closing it aborts the request.

        Raises EngineFault where the engine failed this request alone, EngineDied where it failed all.
        """
        metrics, id = self.metrics, request.id
        arrived = time.monotonic()
        metrics.arrived(id, arrived, request.num_prompt)
        reason, first = FinishReason.ABORT, True
        restarts = getattr(self.channel, "restarts", 0)
        try:
            stream = self.front.stream(request)
            async with aclosing(self.engine.generate(request)) as outputs:  # pyright: ignore[reportArgumentType]
                async for output in outputs:
                    now = time.monotonic()
                    if first:
                        metrics.scheduled(id, min(now, arrived + output.queue_seconds), output.num_cached)
                        first = False
                    if output.error is not None:
                        reason = FinishReason.ERROR
                        alive = self.up and getattr(self.channel, "restarts", 0) == restarts
                        raise EngineFault(output.error) if alive else EngineDied(output.error)
                    delta = stream.push(output)
                    if delta.token_ids:
                        metrics.tokens(id, now, len(delta.token_ids))
                    if delta.finish_reason is not None:
                        reason = delta.finish_reason
                    request.num_cached = max(request.num_cached, output.num_cached)
                    yield delta
                    if delta.finish_reason is not None:
                        return  # a stop string ends it here; leaving the iterator aborts what the engine still runs
        except CutawayError:
            raise
        except Exception as error:
            reason = FinishReason.ERROR
            if fault := find(self.parts, error):
                raise self._at_fault(fault) from error
            raise
        finally:
            metrics.finished(id, time.monotonic(), reason)

    def _at_fault(self, fault: PartFault) -> EngineFault:
        """A part of the front has failed one request. At its third fault the engine's own plays in those that come."""
        line = str(fault)
        if dropped := self.faults.note(fault.parts, line):
            line += f"; the engine's own {' and '.join(dropped)} plays from now on"
            self.parts.leave(PartFault(self.faults.dropped[dropped[0]], dropped))
        log.warning("%s", line)
        return EngineFault(line)

    def stop(self) -> None:
        """Ends every answer now; each tells its client."""
        self.closing = True
        for task in tuple(self.running):
            task.cancel()
