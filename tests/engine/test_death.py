"""The engine process dies, hangs, crashes again and again, or loses its front; nobody waits for ever, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from random import Random

import psutil
import pytest
from rigs import alive, ask, backend, collect, fake, gone_within, run, running, until

from cutaway.core.errors import CutawayError, EngineDied
from cutaway.engine.channel import ProcessChannel


def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def work() -> None:
        sleepy = backend(tmp_path, "def create(config, parts): time.sleep(600)\n")
        channel = ProcessChannel(fake(backend=sleepy), start_timeout=0.5)
        starting = asyncio.create_task(channel.start())
        await until(lambda: channel.pid)
        pid = channel.pid or 0
        with pytest.raises(CutawayError, match=r"did not start within 0\.5 s"):
            await starting
        assert gone_within(pid, 20)

    run(work())


def test_killed_during_a_stream(slow_steps: None) -> None:
    """That stream gets an error long before it could have ended, requests that come meanwhile wait, the next is served."""

    async def work() -> None:
        channel = ProcessChannel(fake())
        async with running(channel) as engine:
            before = await collect(engine, ask(0))
            first = channel.pid
            assert first is not None
            streams = [asyncio.create_task(collect(engine, ask(i, max_tokens=480))) for i in (1, 2)]
            await until(lambda: channel.stats is not None and channel.stats.running == 2)
            os.kill(first, signal.SIGKILL)
            for output in await asyncio.gather(*streams):
                assert output.error is not None
                assert output.error.startswith("the engine process ended (SIGKILL")
                assert output.error.endswith("it is being restarted, send the request again")
                assert len(output.token_ids) < 400
            assert (channel.state, channel.ready, channel.stats) == ("restarting", {}, None)
            after = await collect(engine, ask(0))
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


def test_requests_that_kill_their_engine_slow_it_and_do_not_take_it_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses grow until a request has finished; an abort is no finished request."""
    monkeypatch.setattr("cutaway.engine.channel.PAUSES", (0.0, 0.01, 0.02))
    text = """
class Backend(fake.FakeBackend):
    def submit(self, plan):
        if any(666 in a.tokens for a in plan.admitted): os._exit(9)
        return super().submit(plan)
def create(config, parts): return Backend(seconds=0.02)
"""
    said: list[str] = []

    async def work() -> None:
        channel = ProcessChannel(fake(backend=backend(tmp_path, text)), progress=said.append)
        async with running(channel) as engine:

            async def poison(id: int) -> None:
                evil = ask(id)
                evil.tokens[3] = 666
                assert "exit status 9" in ((await collect(engine, evil)).error or "")

            await poison(0)
            await poison(1)
            async with aclosing(engine.generate(ask(2, max_tokens=480))) as outputs:
                await anext(outputs)
            await until(lambda: channel.stats is not None and channel.stats.running == 0)
            await poison(3)
            await poison(4)
            assert (await collect(engine, ask(5))).error is None
            await poison(6)
            assert (await collect(engine, ask(7))).error is None
            assert (channel.state, channel.restarts) == ("ready", 5)

    run(work())
    ends = [line.removeprefix("the engine process ended (exit status 9); restarting it") for line in said if "ended" in line]
    assert ends == ["", " in 0.01 s", " in 0.02 s", " in 0.02 s", ""]


@pytest.mark.parametrize(
    ("how", "limit", "said"),
    [
        ("raise CutawayError('the model is gone')", 600, "the engine process failed (the model is gone)"),
        ("time.sleep(600)", 0.5, "the engine process did not start within 0.5 s"),
    ],
)
def test_starts_that_fail_are_told_to_those_who_wait_and_given_up(
    how: str, limit: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long they take to fail."""
    monkeypatch.setattr("cutaway.engine.channel.PAUSES", (0.0, 0.5))
    text = f"""
def create(config, parts):
    if os.path.exists("{tmp_path}/second"): {how}
    open("{tmp_path}/second", "w")
    return fake.FakeBackend()
"""

    async def work() -> None:
        said_of_it: list[str] = []
        channel = ProcessChannel(fake(backend=backend(tmp_path, text)), progress=said_of_it.append)
        async with running(channel) as engine:
            channel._start_timeout = limit
            assert channel.pid is not None
            os.kill(channel.pid, signal.SIGKILL)
            await until(lambda: channel.state == "restarting")
            waiting = [asyncio.create_task(collect(engine, ask(i))) for i in range(2)]
            for output in await asyncio.gather(*waiting):
                assert output.error == f"{said}; it is being restarted, send the request again"
            await until(lambda: channel.state == "failed")
            assert channel.failure == f"{said}; given up after 3 starts that failed"
            assert (channel.restarts, channel.stats, said_of_it[-1]) == (3, None, channel.failure)
            with pytest.raises(EngineDied, match="given up"):
                await collect(engine, ask(9))

    run(work())


def test_a_process_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At the first start, and at a restart: those who wait for it hear of it."""
    good, bad = sys.executable, str(tmp_path / "none")

    async def work() -> None:
        monkeypatch.setattr("cutaway.engine.channel.PAUSES", (0.0,))
        channel = ProcessChannel(fake())
        monkeypatch.setattr(sys, "executable", bad)
        with pytest.raises(CutawayError, match=r"cannot be started: FileNotFoundError.*none"):
            await channel.start()
        monkeypatch.setattr(sys, "executable", good)
        channel = ProcessChannel(fake())
        async with running(channel) as engine:
            monkeypatch.setattr(sys, "executable", bad)
            os.kill(channel.pid or 0, signal.SIGKILL)
            await until(lambda: channel.state != "ready")
            with contextlib.suppress(EngineDied):
                assert "the engine process cannot be started" in ((await collect(engine, ask(0))).error or "")
            await until(lambda: channel.state == "failed")

    run(work())


def test_stop_in_the_middle_of_a_start(tmp_path: Path) -> None:
    text = f"def create(config, parts):\n    open('{tmp_path}/pid', 'w').write(str(os.getpid()))\n    time.sleep(60)\n"

    async def work() -> None:
        channel = ProcessChannel(fake(backend=backend(tmp_path, text)))
        starting = asyncio.create_task(channel.start())
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert channel.state == "stopped"
        assert gone_within(int((tmp_path / "pid").read_text()), 20)

    run(work())


def test_a_trace_of_a_crash_is_kept(tmp_path: Path) -> None:
    async def work() -> None:
        channel = ProcessChannel(fake(trace=str(tmp_path / "trace")))
        async with running(channel) as engine:
            await collect(engine, ask(0))
            assert channel.pid is not None
            os.kill(channel.pid, signal.SIGKILL)
            await until(lambda: channel.restarts == 1)
            await collect(engine, ask(1, max_tokens=3))
        assert len((tmp_path / "trace").read_text().splitlines()) == 8
        assert len((tmp_path / "trace.1").read_text().splitlines()) == 3

    run(work())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_disk_that_is_full_costs_the_trace_alone(capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        channel = ProcessChannel(fake(trace="/dev/full"))
        async with running(channel) as engine:
            assert [(await collect(engine, ask(i))).error for i in range(2)] == [None, None]
            assert channel.restarts == 0

    run(work())
    assert capfd.readouterr().err.splitlines() == [
        "cannot write the trace to /dev/full: No space left on device; later steps are not traced"
    ]


def test_stop_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow_steps: None) -> None:
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
    text = f"""
class Backend(fake.FakeBackend):
    def submit(self, plan):
        open("{tmp_path}/hangs", "w")
        time.sleep(600)
def create(config, parts): return Backend()
"""

    async def work() -> None:
        channel = ProcessChannel(fake(backend=backend(tmp_path, text)), stop_timeout=0.5)
        async with running(channel) as engine:
            pid = channel.pid or 0
            task = asyncio.create_task(collect(engine, ask(0)))
            await until((tmp_path / "hangs").exists)
        assert gone_within(pid, 20)
        assert (await task).error == "the engine was stopped"

    run(work())


def test_what_reaches_the_whole_group_is_the_fronts_to_handle(slow_steps: None) -> None:
    """Ctrl-C in a terminal, a service manager's SIGTERM: the front decides, running answers go on."""

    async def work() -> None:
        channel = ProcessChannel(fake())
        async with running(channel) as engine:
            pid = channel.pid
            assert pid is not None
            answer = asyncio.create_task(collect(engine, ask(0, max_tokens=50)))
            await until(lambda: channel.stats is not None and channel.stats.running == 1)
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
            whole = await answer
            assert (whole.error, len(whole.token_ids)) == (None, 50)
            assert (channel.pid, channel.restarts) == (pid, 0)
        assert not alive(pid)

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
            if channel.pid: print(channel.pid, channel._engine._folder, flush=True)

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
        front.wait(30)
        assert gone_within(int(pid), 20)
        assert not Path(folder).exists()


def test_idle_costs_nothing() -> None:
    async def work() -> None:
        channel = ProcessChannel(fake())
        async with running(channel) as engine:
            await collect(engine, ask(0))
            assert channel.pid is not None
            process = psutil.Process(channel.pid)
            before, woken = process.cpu_times(), process.num_ctx_switches().voluntary
            await asyncio.sleep(1)
            after = process.cpu_times()
            assert (after.user + after.system) - (before.user + before.system) <= 0.2
            assert process.num_ctx_switches().voluntary - woken <= 20  # it sleeps, and does not look again and again

    run(work())


def test_a_storm_of_requests_cancellations_and_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request ends in one of three ways, and nothing stays behind on either side."""
    monkeypatch.setenv("CUTAWAY_FAKE_SECONDS", "0.002")
    monkeypatch.setenv("CUTAWAY_DEBUG", "1")
    random = Random(1)

    async def work() -> None:
        channel = ProcessChannel(fake(max_num_seqs=8, kv_blocks=60))
        async with running(channel) as engine:

            async def one(id: int) -> str:
                await asyncio.sleep(random.random() * 3)
                request = ask(id, prompt=random.randint(1, 100), max_tokens=random.randint(1, 60))
                try:
                    async with asyncio.timeout(random.choice([30, 30, 0.05, 0.3])):
                        output = await collect(engine, request)
                except TimeoutError:
                    return "cancelled"
                assert output.error or len(output.token_ids) == request.params.max_tokens
                return "failed" if output.error else "served"

            storm = [asyncio.create_task(one(i)) for i in range(150)]
            await asyncio.sleep(1.5)
            assert channel.pid is not None
            os.kill(channel.pid, signal.SIGKILL)
            ends = await asyncio.gather(*storm)
            assert ends.count("served") > 20
            await until(lambda: channel.stats is not None and channel.stats.running + channel.stats.waiting == 0)
            assert channel.stats is not None
            assert (channel.stats.used, channel.restarts, engine.num_active) == (1, 1, 0)

    run(work())
