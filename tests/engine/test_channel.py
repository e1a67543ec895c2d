"""The engine on a thread and in a process of its own: what callers see, and what happens when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from rigs import LENGTH, AnyChannel, alive, ask, collect, fake, gone_within, run, running, until

from cutaway.core.errors import CutawayError, EngineDied
from cutaway.core.request import FinishReason
from cutaway.engine import messages
from cutaway.engine.channel import InProcessChannel, ProcessChannel
from cutaway.engine.engine import Stats

BOTH = pytest.mark.parametrize("kind", [InProcessChannel, ProcessChannel])
SLOW = {"CUTAWAY_FAKE_SECONDS": "0.02"}  # a step's time, so that there is time to interfere


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLOW.items():
        monkeypatch.setenv(name, value)


def backend(tmp_path: Path, text: str) -> str:
    """The import string of a backend of the test's own."""
    file = tmp_path / "backend.py"
    file.write_text("import os, time\nfrom cutaway.core.errors import CutawayError\nfrom cutaway.backends import fake\n" + text)
    return f"{file}:create"


def test_messages_survive_the_way() -> None:
    request = ask(7, stop=["a"], seed=2**64 - 1, logprobs=3)
    request.stop_ids, request.hashes = frozenset({1, 2}), [b"\x00" * 32]
    sent = messages.Add([messages.NewRequest.of(request)])
    got = messages.engine_decoder().decode(messages.encode(sent))
    assert got == sent
    again = got.requests[0].request()
    assert (again.id, again.tokens, again.params) == (7, request.tokens, request.params)
    assert (again.stop_ids, again.hashes, again.num_prompt) == (request.stop_ids, request.hashes, 20)
    assert again.tokens is not sent.requests[0].tokens
    for message in (messages.Start(fake()), messages.Abort([1, 2]), messages.Stop()):
        assert messages.engine_decoder().decode(messages.encode(message)) == message
    for message in (messages.Loading("x"), messages.Ready({"window": 3}), messages.Failed("y")):
        assert messages.front_decoder().decode(messages.encode(message)) == message
    outputs = messages.Outputs([], Stats(step=3))
    assert messages.front_decoder().decode(messages.encode(outputs)) == outputs


@BOTH
def test_ids_are_those_of_the_engine_itself(kind: type[AnyChannel]) -> None:
    from cutaway.engine.parts import Parts
    from cutaway.engine.process import build

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
def test_64_at_once_interleave(kind: type[AnyChannel]) -> None:
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
def test_closing_frees_the_blocks(kind: type[AnyChannel], slow: None) -> None:
    async def work() -> None:
        channel = kind(fake(prefix_cache=False))
        async with running(channel) as engine:
            async with aclosing(engine.generate(ask(0, prompt=100, max_tokens=300))) as outputs:
                await anext(outputs)
                await until(lambda: channel.stats is not None and channel.stats.used >= 8)
                step = channel.stats.step if channel.stats else 0
            await until(lambda: channel.stats is not None and channel.stats.used == 1)  # the dummy block
            assert channel.stats is not None
            assert channel.stats.step <= step + 4  # those underway when it was closed, and none for long
            assert (channel.stats.running, channel.stats.waiting) == (0, 0)
            assert (await collect(engine, ask(1))).finish_reason is LENGTH

    run(work())


@BOTH
def test_aborts_in_all_states(kind: type[AnyChannel], slow: None) -> None:
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


@BOTH
def test_a_fault_at_load_is_one_line(kind: type[AnyChannel], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work(text: str, line: str) -> None:
        channel = kind(fake(backend=backend(tmp_path, text)))
        with pytest.raises(CutawayError) as caught:
            await asyncio.wait_for(running(channel).__aenter__(), 30)
        assert str(caught.value) == line
        with pytest.raises(EngineDied):
            channel.add(ask(0))
        await channel.stop()

    run(work("def create(config, parts): raise CutawayError('no such model: try another')\n", "no such model: try another"))
    if kind is ProcessChannel:
        run(work("def create(config, parts): raise KeyError('wq')\n", "KeyError: 'wq'"))
        run(work("def create(config, parts): os._exit(3)\n", "the engine process ended (exit status 3)"))
    assert capfd.readouterr() == ("", "")


def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def work() -> None:
        sleepy = backend(tmp_path, f"def create(config, parts):\n    open('{tmp_path}/pid', 'w').write(str(os.getpid()))\n"
                                   "    time.sleep(60)\n")  # fmt: skip
        channel = ProcessChannel(fake(backend=sleepy), start_timeout=2)
        with pytest.raises(CutawayError, match="did not start within 2 s"):
            await channel.start()
        assert gone_within(int((tmp_path / "pid").read_text()), 1)

    run(work())


def test_killed_during_a_stream(slow: None) -> None:
    """That stream gets an error, requests that come meanwhile wait, and the next one is served within ten seconds."""

    async def work() -> None:
        channel = ProcessChannel(fake())
        async with running(channel) as engine:
            before = await collect(engine, ask(0))
            first = channel.pid
            assert first is not None
            streams = [asyncio.create_task(collect(engine, ask(i, max_tokens=400))) for i in (1, 2)]
            await until(lambda: channel.stats is not None and channel.stats.running == 2)
            began = time.monotonic()
            os.kill(first, signal.SIGKILL)
            for output in await asyncio.gather(*streams):
                assert output.error is not None
                assert output.error.startswith("the engine process ended (SIGKILL")
                assert output.error.endswith("it is being restarted, send the request again")
            assert time.monotonic() - began < 1
            assert (channel.state, channel.ready) == ("restarting", {})
            after = await collect(engine, ask(3 - 3))
            assert time.monotonic() - began < 10
            assert after.token_ids == before.token_ids
            assert (channel.state, channel.restarts, channel.ready["window"]) == ("ready", 1, 512)
            assert channel.pid not in (None, first)
            assert not alive(first)

    run(work())


def test_an_exception_in_a_step_is_told_and_mended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
class Backend(fake.FakeBackend):
    def submit(self, plan):
        if any(666 in a.tokens for a in plan.admitted):
            raise RuntimeError("matmul: shapes differ")
        return super().submit(plan)
def create(config, parts): return Backend()
"""

    async def work() -> None:
        async with running(ProcessChannel(fake(backend=backend(tmp_path, text)))) as engine:
            evil = ask(0)
            evil.tokens[3] = 666
            failed = await collect(engine, evil)
            assert failed.error == (
                "the engine process failed (RuntimeError: matmul: shapes differ); it is being restarted, send the request again"
            )
            assert (await collect(engine, ask(1))).error is None

    run(work())
    assert capfd.readouterr() == ("", "")


def test_a_crash_loop_is_given_up(tmp_path: Path) -> None:
    text = """
class Backend(fake.FakeBackend):
    def submit(self, plan): os._exit(9)
def create(config, parts): return Backend()
"""

    async def work() -> None:
        channel = ProcessChannel(fake(backend=backend(tmp_path, text)))
        async with running(channel) as engine:
            for n in range(3):
                assert "exit status 9" in ((await collect(engine, ask(n))).error or "")
            assert channel.state == "failed"
            assert channel.failure == "the engine process ended (exit status 9); given up after 3 such ends in a row"
            with pytest.raises(EngineDied, match="given up"):
                await collect(engine, ask(9))

    run(work())


def test_requests_wait_for_a_restart_that_fails_and_hear_of_it(tmp_path: Path) -> None:
    text = f"""
def create(config, parts):
    if os.path.exists("{tmp_path}/second"): raise CutawayError("the model is gone")
    open("{tmp_path}/second", "w")
    return fake.FakeBackend()
"""

    async def work() -> None:
        channel = ProcessChannel(fake(backend=backend(tmp_path, text)))
        async with running(channel) as engine:
            assert channel.pid is not None
            os.kill(channel.pid, signal.SIGKILL)
            await until(lambda: channel.state == "restarting")
            waiting = asyncio.create_task(collect(engine, ask(0)))
            output = await asyncio.wait_for(waiting, 20)
            assert output.error == "the engine process failed (the model is gone); given up after 3 such ends in a row"

    run(work())


def test_a_trace_of_a_crash_is_kept(tmp_path: Path) -> None:
    async def work() -> None:
        channel = ProcessChannel(fake(trace=str(tmp_path / "trace")))
        async with running(channel) as engine:
            await collect(engine, ask(0))
            assert channel.pid is not None
            os.kill(channel.pid, signal.SIGKILL)
            await until(lambda: channel.state == "restarting")
            await collect(engine, ask(1, max_tokens=3))
        assert len((tmp_path / "trace").read_text().splitlines()) == 8
        assert len((tmp_path / "trace.1").read_text().splitlines()) == 3

    run(work())


def test_stop_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: None) -> None:
    short = Path(os.path.realpath(f"/tmp/cw{os.getpid()}"))
    short.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(short))

    async def work() -> None:
        channel = ProcessChannel(fake())
        engine_pid = 0
        async with running(channel) as engine:
            engine_pid = channel.pid or 0
            folder = next(short.iterdir())
            assert folder.stat().st_mode & 0o777 == 0o700
            open_stream = asyncio.create_task(collect(engine, ask(0, max_tokens=400)))
            await until(lambda: channel.stats is not None and channel.stats.running == 1)
        assert (await open_stream).error == "the engine was stopped"
        assert not alive(engine_pid)
        assert list(short.iterdir()) == []
        await channel.stop()  # twice is nothing
        with pytest.raises(EngineDied):
            channel.add(ask(1))

    try:
        run(work())
    finally:
        short.rmdir()


def test_an_engine_that_hangs_in_a_step_is_killed_by_stop(tmp_path: Path) -> None:
    text = """
class Backend(fake.FakeBackend):
    def submit(self, plan):
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
def create(config, parts): return Backend()
"""

    async def work() -> None:
        channel = ProcessChannel(fake(backend=backend(tmp_path, text)), stop_timeout=0.5)
        began = 0.0
        async with running(channel) as engine:
            pid = channel.pid or 0
            task = asyncio.create_task(collect(engine, ask(0)))
            await asyncio.sleep(0.3)
            began = time.monotonic()
        assert time.monotonic() - began < 5
        assert gone_within(pid, 1)
        assert (await task).error == "the engine was stopped"

    run(work())


def test_sigint_is_the_fronts_and_sigterm_ends_in_order() -> None:
    async def work() -> None:
        channel = ProcessChannel(fake())
        async with running(channel) as engine:
            pid = channel.pid
            assert pid is not None
            os.kill(pid, signal.SIGINT)
            assert (await collect(engine, ask(0))).error is None
            assert channel.pid == pid
            os.kill(pid, signal.SIGTERM)
            await until(lambda: channel.state == "restarting")
            assert channel.failure == "the engine process ended (exit status 0)"
            assert (await collect(engine, ask(1))).error is None

    run(work())


FRONT = """
import asyncio, sys
sys.path.insert(0, {here!r})
from rigs import ask, collect, fake, running
from cutaway.engine.channel import ProcessChannel

async def main():
    channel = ProcessChannel(fake())
    async with running(channel) as engine:
        async for output in engine.generate(ask(0, max_tokens=400)):
            if channel.pid: print(channel.pid, channel._folder, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_does_not_outlive_its_front(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "front.py"
    script.write_text(FRONT.format(here=str(Path(__file__).parent)))
    environment = os.environ | {"CUTAWAY_FAKE_SECONDS": "0.05"}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as front:
        assert front.stdout is not None
        pid, folder = front.stdout.readline().split()
        assert Path(folder).is_dir()
        front.send_signal(how)
        front.wait(10)
        assert gone_within(int(pid), 2)
        assert not Path(folder).exists()


def test_idle_costs_nothing() -> None:
    async def work() -> None:
        import psutil

        channel = ProcessChannel(fake())
        async with running(channel) as engine:
            await collect(engine, ask(0))
            assert channel.pid is not None
            process = psutil.Process(channel.pid)
            before = process.cpu_times()
            await asyncio.sleep(1)
            after = process.cpu_times()
            assert (after.user + after.system) - (before.user + before.system) <= 0.02

    run(work())
