"""Part 15 against a channel that the test plays by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from rigs import run, until

from cutaway.core.errors import EngineDied
from cutaway.core.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from cutaway.engine.async_engine import AsyncEngine


class HandChannel:
    """Notes what it is told; what it says is pushed by the test."""

    def __init__(self) -> None:
        self.added: list[int] = []
        self.aborted: list[int] = []
        self.refuse: Exception | None = None
        self.queue: asyncio.Queue[list[Output] | Exception] = asyncio.Queue()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def add(self, request: Request) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.added.append(request.id)

    def abort(self, ids: Sequence[int]) -> None:
        self.aborted += ids

    async def receive(self) -> list[Output]:
        item = await self.queue.get()
        if isinstance(item, Exception):
            raise item
        return item


def request(id: int) -> Request:
    return Request(id, [1, 2, 3], SamplingParams(max_tokens=100))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def started() -> tuple[AsyncEngine, HandChannel]:
    channel = HandChannel()
    engine = AsyncEngine(channel)
    await engine.start()
    return engine, channel


def test_outputs_reach_their_own_request_in_order() -> None:
    async def work() -> None:
        engine, channel = await started()

        async def ids(id: int) -> list[int]:
            got: list[int] = []
            async for output in engine.generate(request(id)):
                assert output.id == id
                got += output.token_ids
            return got

        tasks = [asyncio.create_task(ids(i)) for i in range(64)]
        await until(lambda: len(channel.added) == 64)
        assert engine.num_active == 64
        for step in range(5):
            channel.queue.put_nowait([Output(i, [i * 10 + step]) for i in range(64)])
            await settle()
        channel.queue.put_nowait([Output(i, [-i], finish_reason=FinishReason.LENGTH) for i in range(64)])
        results = await asyncio.gather(*tasks)
        assert results == [[i * 10 + s for s in range(5)] + [-i] for i in range(64)]
        assert channel.aborted == []
        assert engine.num_active == 0
        await engine.stop()

    run(work())


def test_two_requests_interleave() -> None:
    async def work() -> None:
        engine, channel = await started()
        seen: list[int] = []

        async def read(id: int) -> None:
            async for output in engine.generate(request(id)):
                seen.append(output.id)

        tasks = [asyncio.create_task(read(i)) for i in (0, 1)]
        await until(lambda: len(channel.added) == 2)
        for _ in range(3):
            channel.queue.put_nowait([Output(0, [1]), Output(1, [2])])
            await settle()
        channel.queue.put_nowait([Output(i, [], finish_reason=FinishReason.STOP) for i in (0, 1)])
        await asyncio.gather(*tasks)
        assert seen == [0, 1] * 4
        await engine.stop()

    run(work())


def test_closing_aborts_once_in_every_state() -> None:
    async def work() -> None:
        engine, channel = await started()
        outputs = engine.generate(request(0))  # never begun: nothing was asked, nothing is aborted
        await outputs.aclose()
        assert (channel.added, channel.aborted) == ([], [])

        waiting = asyncio.create_task(anext(engine.generate(request(1))))  # waiting for its first token
        await until(lambda: channel.added == [1])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await settle()
        assert channel.aborted == [1]

        async with aclosing(engine.generate(request(2))) as outputs:  # between two tokens
            channel.queue.put_nowait([Output(2, [7])])
            assert (await anext(outputs)).token_ids == [7]
        assert channel.aborted == [1, 2]
        await outputs.aclose()
        assert channel.aborted == [1, 2]

        async with aclosing(engine.generate(request(3))) as outputs:  # its finish has come, the reader has not seen it
            channel.queue.put_nowait([Output(3, [7])])
            await anext(outputs)
            channel.queue.put_nowait([Output(3, [8], finish_reason=FinishReason.STOP)])
            await settle()
        assert channel.aborted == [1, 2]

        channel.queue.put_nowait([Output(2, [9])])  # late outputs of an aborted request are nobody's
        await settle()
        assert engine.num_active == 0
        await engine.stop()

    run(work())


def test_a_slow_reader_gets_all_in_one_and_holds_up_nobody() -> None:
    async def work() -> None:
        engine, channel = await started()
        slow, quick = engine.generate(request(0)), engine.generate(request(1))
        first = asyncio.create_task(anext(slow))
        quick_ids: list[int] = []

        async def read() -> None:
            async for output in quick:
                quick_ids.extend(output.token_ids)

        reader = asyncio.create_task(read())
        await until(lambda: len(channel.added) == 2)
        for n in range(500):
            logprobs = [TokenLogprobs(-float(n), [n], [-float(n)])]
            channel.queue.put_nowait([Output(0, [n], logprobs, num_cached=3 if n == 1 else 0), Output(1, [n])])
            await settle()
            if n == 0:
                assert (await first).token_ids == [0]
        assert quick_ids == list(range(500))
        channel.queue.put_nowait([Output(0, [500], finish_reason=FinishReason.LENGTH)])
        channel.queue.put_nowait([Output(1, [], finish_reason=FinishReason.STOP, stop_reason=5)])
        await reader
        rest = await anext(slow)
        assert rest.token_ids == list(range(1, 501))
        assert rest.logprobs is not None
        assert [p.chosen for p in rest.logprobs] == [-float(n) for n in range(1, 500)]
        assert (rest.finish_reason, rest.num_cached) == (FinishReason.LENGTH, 3)
        with pytest.raises(StopAsyncIteration):
            await anext(slow)
        await engine.stop()

    run(work())


def test_what_it_is_given_is_never_changed() -> None:
    async def work() -> None:
        engine, channel = await started()
        outputs = engine.generate(request(0))
        waiting = asyncio.create_task(anext(outputs))
        await until(lambda: channel.added == [0])
        given = [Output(0, [1]), Output(0, [2])]
        channel.queue.put_nowait(list(given))
        assert (await waiting).token_ids == [1, 2]
        assert [o.token_ids for o in given] == [[1], [2]]
        await outputs.aclose()
        await engine.stop()

    run(work())


def test_an_engine_gone_for_good_fails_all_who_wait() -> None:
    async def work() -> None:
        engine, channel = await started()
        tasks = [asyncio.create_task(anext(engine.generate(request(i)))) for i in range(3)]
        await until(lambda: len(channel.added) == 3)
        channel.queue.put_nowait(EngineDied("the engine process ended"))
        for output in await asyncio.gather(*tasks):
            assert (output.error, output.finish_reason) == ("the engine process ended", FinishReason.ERROR)
        channel.refuse = EngineDied("there is no engine")
        with pytest.raises(EngineDied, match="there is no engine"):
            await anext(engine.generate(request(9)))
        assert channel.aborted == []
        assert engine.num_active == 0
        await engine.stop()

    run(work())


def test_stop_ends_open_iterators() -> None:
    async def work() -> None:
        engine, channel = await started()
        waiting = asyncio.create_task(anext(engine.generate(request(0))))
        await until(lambda: channel.added == [0])
        await engine.stop()
        assert (await waiting).error == "the engine was stopped"
        assert channel.aborted == []

    run(work())


def test_an_id_runs_once() -> None:
    async def work() -> None:
        engine, channel = await started()
        async with aclosing(engine.generate(request(0))) as outputs:
            channel.queue.put_nowait([Output(0, [7])])
            await anext(outputs)
            with pytest.raises(ValueError, match="request 0 is running already"):
                await anext(engine.generate(request(0)))
            assert engine.num_active == 1
        assert channel.aborted == [0]
        await engine.stop()

    run(work())
