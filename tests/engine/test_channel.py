"""The engine on a thread and in a process of its own: what callers see, and what happens when it dies."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from rigs import LENGTH, AnyChannel, ask, backend, collect, fake, run, running, until

from cutaway.core.errors import CutawayError, EngineDied
from cutaway.core.request import FinishReason, Request
from cutaway.engine import messages
from cutaway.engine.channel import InProcessChannel, ProcessChannel
from cutaway.engine.engine import Stats
from cutaway.engine.parts import Parts
from cutaway.engine.process import build, load_backend

BOTH = pytest.mark.parametrize("kind", [InProcessChannel, ProcessChannel])


def test_messages_survive_the_way() -> None:
    request = ask(7, stop=["a"], seed=2**64 - 1, logprobs=3)
    request.stop_ids, request.hashes = frozenset({1, 2}), [b"\x00" * 32]
    sent = messages.Add([messages.NewRequest.of(request)])
    got = messages.engine_decoder().decode(messages.encode(sent))
    assert got == sent
    again = got.requests[0].request()
    assert (again.id, again.tokens) == (7, request.tokens)
    assert again.params == replace(request.params, stop=[])  # text stays in the front
    assert request.params.stop == ["a"]
    assert (again.stop_ids, again.hashes, again.num_prompt) == (request.stop_ids, request.hashes, 20)
    assert again.tokens is not sent.requests[0].tokens
    for message in (messages.Start(fake(), ["", "/x"]), messages.Abort([1, 2]), messages.Stop()):
        assert messages.engine_decoder().decode(messages.encode(message)) == message
    for message in (messages.Loading("x"), messages.Ready({"window": 3}), messages.Failed("y")):
        assert messages.front_decoder().decode(messages.encode(message)) == message
    outputs = messages.Outputs([], Stats(step=3))
    assert messages.front_decoder().decode(messages.encode(outputs)) == outputs


@BOTH
def test_ids_are_those_of_the_engine_itself(kind: type[AnyChannel]) -> None:
    engine, info = build(fake(), Parts())
    alone: dict[int, list[int]] = {}
    for i in range(4):
        engine.add(ask(i))
    while engine.has_work:
        for output in engine.step():
            alone.setdefault(output.id, []).extend(output.token_ids)

    async def work() -> None:
        channel = kind(fake())
        async with running(channel) as served:
            got = await asyncio.gather(*(collect(served, ask(i)) for i in range(4)))
            assert {o.id: o.token_ids for o in got} == alone
            assert all((o.finish_reason, o.error) == (LENGTH, None) for o in got)
            assert channel.ready == info
            assert (info["window"], info["block_size"], info["rows"], info["budget"]) == (512, 16, 16, 512)
        assert channel.state == "stopped"

    run(work())


@BOTH
def test_64_at_once_interleave(kind: type[AnyChannel], slow_steps: None) -> None:
    async def work() -> None:
        order: list[int] = []
        async with running(kind(fake(max_num_seqs=16))) as engine:

            async def read(id: int) -> int:
                n = 0
                async for output in engine.generate(ask(id, max_tokens=12)):
                    order.append(id)
                    n += len(output.token_ids)
                return n

            assert await asyncio.gather(*(read(i) for i in range(64))) == [12] * 64
            assert engine.num_active == 0
        first, last = {}, {}
        for place, id in enumerate(order):
            first.setdefault(id, place)
            last[id] = place
        assert sum(first[b] < last[a] for a in range(16) for b in range(16) if a != b) > 200  # of 240 pairs

    run(work())


@BOTH
def test_closing_frees_the_blocks(kind: type[AnyChannel], slow_steps: None) -> None:
    async def work() -> None:
        channel = kind(fake(prefix_cache=False))
        async with running(channel) as engine:
            async with aclosing(engine.generate(ask(0, prompt=100, max_tokens=300))) as outputs:
                await anext(outputs)
                await until(lambda: channel.stats is not None and channel.stats.used >= 8)
                step = channel.stats.step if channel.stats else 0
            await until(lambda: channel.stats is not None and channel.stats.used == 1)  # the dummy block
            assert channel.stats is not None
            assert channel.stats.step <= step + 100  # those underway when it was closed, and none for long
            assert (channel.stats.running, channel.stats.waiting) == (0, 0)
            assert (await collect(engine, ask(1))).finish_reason is LENGTH

    run(work())


@BOTH
def test_aborts_in_all_states(kind: type[AnyChannel], slow_steps: None) -> None:
    """Waiting for a row, mid-prompt, decoding, and at any moment in between."""

    async def work() -> None:
        channel = kind(fake(max_num_seqs=2, max_num_batched_tokens=16, prefix_cache=False))
        async with running(channel) as engine:
            tasks = [asyncio.create_task(collect(engine, ask(i, prompt=60, max_tokens=40))) for i in range(12)]
            for n, task in enumerate(tasks[:-1]):
                await asyncio.sleep(0.013 * (n % 3))
                task.cancel()
            last = await tasks[-1]
            assert (len(last.token_ids), last.finish_reason) == (40, LENGTH)
            await until(lambda: channel.stats is not None and channel.stats.used == 1)
            assert engine.num_active == 0

    run(work())


@BOTH
def test_what_can_never_run_fails_alone(kind: type[AnyChannel]) -> None:
    async def work() -> None:
        async with running(kind(fake(max_model_len=64))) as engine:
            refused, served = await asyncio.gather(collect(engine, ask(0, 60, 40)), collect(engine, ask(1)))
            assert refused.error is not None
            assert "64" in refused.error
            assert refused.finish_reason is FinishReason.ERROR
            assert (served.error, len(served.token_ids)) == (None, 8)

    run(work())


def test_what_no_message_can_hold_fails_alone() -> None:
    """In one turn with others, then by itself; whoever comes later is served."""

    def beyond(id: int) -> Request:
        request = ask(id)
        request.params.seed = 2**70  # set after the checks, as a setting that has none would be
        return request

    async def work() -> None:
        channel = ProcessChannel(fake())
        async with running(channel) as engine:
            first, evil, second = await asyncio.gather(*(collect(engine, r) for r in (ask(0), beyond(1), ask(2))))
            assert (first.error, second.error) == (None, None)
            assert len(first.token_ids) == len(second.token_ids) == 8
            for failed in (evil, await collect(engine, beyond(3))):
                assert failed.error is not None
                assert failed.error.startswith("the request cannot be sent to the engine: ")
                assert "\n" not in failed.error
                assert failed.finish_reason is FinishReason.ERROR
            assert (await collect(engine, ask(4))).error is None
            assert (channel._live, channel._waiting, channel.restarts) == (set(), {}, 0)

    run(work())


@BOTH
def test_a_fault_at_load_is_one_line(kind: type[AnyChannel], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work(text: str, line: str) -> None:
        channel = kind(fake(backend=backend(tmp_path, text)))
        with pytest.raises(CutawayError) as caught:
            await asyncio.wait_for(running(channel).__aenter__(), 100)
        assert str(caught.value) == line
        with pytest.raises(EngineDied):
            channel.add(ask(0))
        await channel.stop()

    run(work("def create(config, parts): raise CutawayError('no such model: try another')\n", "no such model: try another"))
    if kind is ProcessChannel:
        run(work("def create(config, parts): raise KeyError('wq')\n", "KeyError: 'wq'"))
        run(work("def create(config, parts): os._exit(3)\n", "the engine process ended (exit status 3)"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nothing", "backend must be \"module:function\", got 'nothing'"),
        (
            "cutaway.backends.none:create",
            "there is no backend cutaway.backends.none:create: No module named 'cutaway.backends.none'",
        ),
        ("cutaway.backends.fake:no", "there is no backend cutaway.backends.fake:no: cutaway.backends.fake has no no"),
    ],
)
def test_a_backend_that_does_not_exist(name: str, line: str) -> None:
    with pytest.raises(CutawayError) as caught:
        load_backend(fake(backend=name), Parts())
    assert str(caught.value) == line


def test_a_backend_whose_library_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "needs.py").write_text("import torch\n")
    with pytest.raises(CutawayError, match=r"needs torch, which is not installed: pip install .*torch"):
        load_backend(fake(backend=f"{tmp_path}/needs.py:create"), Parts())


def test_import_strings_mean_the_same_in_both_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the front can import the engine can; what lies in the folder that it is started in cannot get in its way."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text("from cutaway.backends.fake import create\n")
    (tmp_path / "zmq.py").write_text("raise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))

    async def work() -> None:
        async with running(ProcessChannel(fake(backend="mine:create"))) as engine:
            assert (await collect(engine, ask(0))).error is None

    run(work())
