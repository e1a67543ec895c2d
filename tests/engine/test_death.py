"""The engine process dies, hangs, crashes again and again, or loses its front; nobody waits for ever, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import psutil
import pytest
from rigs import alive, ask, backend, collect, fake, gone_within, run, running, until

from cutaway.core.errors import CutawayError, EngineDied
from cutaway.engine.channel import ProcessChannel


def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def work() -> None:
        sleepy = backend(tmp_path, f"def create(config, parts):\n    open('{tmp_path}/pid', 'w').write(str(os.getpid()))\n"
                                   "    time.sleep(60)\n")  # fmt: skip
        channel = ProcessChannel(fake(backend=sleepy), start_timeout=2)
        with pytest.raises(CutawayError, match="did not start within 2 s"):
            await channel.start()
        assert gone_within(int((tmp_path / "pid").read_text()), 1)

    run(work())


def test_killed_during_a_stream(slow_steps: None) -> None:
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


def test_a_process_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At the first start, and at a restart: those who wait for it hear of it."""
    good, bad = sys.executable, str(tmp_path / "none")

    async def work() -> None:
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
                assert "given up after 3" in ((await collect(engine, ask(0))).error or "")
            assert channel.state == "failed"

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
        assert gone_within(int((tmp_path / "pid").read_text()), 1)

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
            await until(lambda: channel.failure is not None)
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
        front.wait(10)
        assert gone_within(int(pid), 2)
        assert not Path(folder).exists()


def test_idle_costs_nothing() -> None:
    async def work() -> None:
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
            assert ends.count("served") > 50
            await until(lambda: channel.stats is not None and channel.stats.running + channel.stats.waiting == 0)
            assert channel.stats is not None
            assert (channel.stats.used, channel.restarts, engine.num_active) == (1, 1, 0)

    run(work())
