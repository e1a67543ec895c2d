"""Parts that are at fault, in engine processes: what is said, when the engine's own plays instead, that serving goes on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rigs import ask, backend, collect, fake, run, running, until

from cutaway.core.errors import CutawayError
from cutaway.core.request import Output
from cutaway.engine.channel import ProcessChannel
from cutaway.engine.faults import Faults

SCHEDULER = """from cutaway.core.scheduler import Scheduler as Own
import os, sys, time
class Scheduler(Own):
    def schedule(self):
        if any(666 in r.tokens for r in self.waiting): {fault}
        return super().schedule()
"""
CACHE = """from cutaway.core.prefix_cache import PrefixCache as Own, chain
class PrefixCache(Own):
    def lookup(self, hashes):
        return {answer}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part may take a second, not ten."""
    monkeypatch.setenv("CUTAWAY_PART_SECONDS", "1")
    monkeypatch.setattr("cutaway.engine.channel.PAUSES", (0.0, 0.01))


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def evil(id: int) -> Any:
    request = ask(id)
    request.tokens[3] = 666
    return request


@dataclass
class Seen:
    """What a server would show of one run: errors of evil requests, lines on standard error."""

    errors: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    restarts: int = 0


def serve(parts: dict[str, str], evils: int, make: Any = evil, **settings: Any) -> Seen:
    """Evil requests one after the other, then one of each kind that has to be served."""
    seen = Seen()

    async def work() -> None:
        channel = ProcessChannel(fake(parts=parts, **settings), progress=seen.said.append)
        async with running(channel) as engine:
            for id in range(evils):
                seen.errors.append((await collect(engine, make(id))).error or "")
            expected = await alone(make(8))
            assert (await collect(engine, make(8))).token_ids == expected.token_ids
            assert (await collect(engine, ask(9))).error is None
            seen.dropped, seen.restarts = dict(channel.dropped), channel.restarts
            assert channel.state == "ready"
            report = channel.ready["parts"]
            assert all(report[name]["reference"] for name in channel.dropped)

    run(work())
    seen.said = [line for line in seen.said if not line.startswith("loading")]
    return seen


async def alone(request: Any) -> Output:
    """What the engine's own parts answer."""
    async with running(ProcessChannel(fake())) as engine:
        return await collect(engine, request)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("raise ValueError('no\\nway')", "ValueError: no way"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_three_exceptions_cost_a_part_its_place(fault: str, line: str, tmp_path: Path) -> None:
    file = write(tmp_path, SCHEDULER.format(fault=fault))
    where = f"{file}, line 5, in schedule (part scheduler, stage 10): {line}"
    seen = serve({"scheduler": file}, evils=3)
    failed = f"the engine process failed ({where}); "
    assert seen.errors == [failed + "it is being restarted, send the request again"] * 2 + [
        failed + "it is being restarted with the engine's own scheduler, send the request again"
    ]
    assert seen.said[-1] == failed + "restarting it with the engine's own scheduler"
    assert (seen.dropped, seen.restarts) == ({"scheduler": f"3 faults, the last: {where}"}, 3)


@pytest.mark.parametrize(
    ("part", "text", "says"),
    [
        ("scheduler", SCHEDULER.format(fault="return None"), "'NoneType' object has no attribute 'preempted'"),
        ("scheduler", SCHEDULER.format(fault="return Own.__new__(Own)"), "has no attribute 'preempted'"),
        ("prefix_cache", CACHE.format(answer="7"), "'int' object is not iterable"),
        ("prefix_cache", CACHE.format(answer="['a block']"), "in "),
        ("chunked", "def split(pending, budget, chunk):\n    return None\n", "'NoneType' object is not"),
    ],
)
def test_answers_that_nobody_can_use_are_the_parts_fault(part: str, text: str, says: str, tmp_path: Path) -> None:
    """The error arises in the engine's own files: who was asked there is known."""
    file = write(tmp_path, text)
    seen = serve({part: file}, evils=3)
    assert all(says in error and f"mine.py (part {part}, stage" in error for error in seen.errors), seen.errors
    assert list(seen.dropped) == [part]


@pytest.mark.parametrize(
    "fault",
    [
        "\n            while True: pass",
        "time.sleep(600)",
        "\n            while True: sum(x for x in range(100))",
    ],
)
def test_a_step_that_never_comes_back_costs_it_at_once(fault: str, tmp_path: Path) -> None:
    file = write(tmp_path, SCHEDULER.format(fault=fault))
    seen = serve({"scheduler": file}, evils=1)
    (line,) = seen.dropped.values()
    assert line.startswith(f"{file}, line ")
    assert line.endswith(" (part scheduler, stage 10): has not come back for 1 s")
    assert seen.errors == [
        f"the engine process failed ({line}); it is being restarted with the engine's own scheduler, send the request again"
    ]
    assert seen.restarts == 1


@pytest.mark.parametrize(
    "where", ["while True: pass\n", SCHEDULER + "    def __init__(self, *a, **k):\n        while True: pass\n"]
)
def test_a_part_that_never_loads_costs_it_at_once(where: str, tmp_path: Path) -> None:
    file = write(tmp_path, where.format(fault="pass"))
    seen = serve({"scheduler": file}, evils=0)
    assert list(seen.dropped) == ["scheduler"]
    assert f"{file}, line " in seen.dropped["scheduler"]
    assert seen.said[-1].endswith("; restarting it with the engine's own scheduler")


def test_requests_that_wait_are_served_after_a_part_is_dropped(tmp_path: Path) -> None:
    file = write(tmp_path, SCHEDULER.format(fault="\n            while True: pass"))

    async def work() -> None:
        channel = ProcessChannel(fake(parts={"scheduler": file}))
        async with running(channel) as engine:
            hung = asyncio.create_task(collect(engine, evil(0)))
            await until(lambda: channel.state == "restarting")
            later = await asyncio.gather(*(collect(engine, ask(i)) for i in range(1, 9)))
            assert [len(o.token_ids) for o in later] == [8] * 8
            assert (await hung).error

    run(work())


def test_a_slow_step_is_nobodys_fault(tmp_path: Path) -> None:
    """The part is asked in it, and is not what takes the time; nor is a library that takes long to import."""
    slow = backend(
        tmp_path,
        "class Backend(fake.FakeBackend):\n"
        "    def submit(self, plan):\n"
        "        time.sleep(2.5 if plan.step == 2 else 0)\n"
        "        return super().submit(plan)\n"
        "def create(config, parts): return Backend()\n",
    )
    write(tmp_path, "import time\ntime.sleep(2.5)\n", "slow_library_of_somebody.py")
    text = f"import sys\nsys.path.append({str(tmp_path)!r})\nimport slow_library_of_somebody\n"
    file = write(tmp_path, text + SCHEDULER.format(fault="pass"))
    seen = serve({"scheduler": file}, evils=1, backend=slow)
    assert (seen.errors, seen.dropped, seen.restarts) == ([""], {}, 0)


def test_an_idle_engine_is_nobodys_fault(tmp_path: Path) -> None:
    async def work() -> None:
        file = write(tmp_path, SCHEDULER.format(fault="pass"))
        channel = ProcessChannel(fake(parts={"scheduler": file}))
        async with running(channel) as engine:
            await asyncio.sleep(2.5)
            assert (await collect(engine, ask(0))).error is None
            assert channel.restarts == 0

    run(work())


def test_a_process_that_ends_without_a_word(tmp_path: Path) -> None:
    """The only part that is not the engine's own is blamed; of several it can be said that they are there."""
    scheduler = write(tmp_path, SCHEDULER.format(fault="os._exit(7)"), "s.py")
    cache = write(tmp_path, CACHE.format(answer="super().lookup(hashes)"), "c.py")
    seen = serve({"scheduler": scheduler}, evils=3)
    ended = "the engine process ended (exit status 7); "
    only = ended + "s.py (part scheduler, stage 10) is the only part that is not the engine's own"
    assert all(error.startswith(only) for error in seen.errors)
    assert seen.dropped == {"scheduler": f"3 faults, the last: {only}"}
    seen = serve({"scheduler": scheduler, "prefix_cache": cache, "metrics": scheduler}, evils=3)
    both = "parts that are not the engine's own: s.py (part scheduler, stage 10), c.py (part prefix_cache, stage 09)"
    assert all(both in error for error in seen.errors)
    assert sorted(seen.dropped) == ["prefix_cache", "scheduler"]


def test_a_part_that_ends_the_process_while_it_loads_is_said_at_start(tmp_path: Path) -> None:
    for text, says in (
        ("import os\nos._exit(3)\n", "exit status 3"),
        ("import sys\nsys.exit(3)\n", "line 2: cannot be the part"),
    ):
        with pytest.raises(CutawayError, match=says) as error:
            serve({"scheduler": write(tmp_path, text)}, evils=0)
        assert "mine.py" in str(error.value)


def test_a_file_that_breaks_while_the_engine_serves(tmp_path: Path) -> None:
    """Three starts that fail for a part are three faults of it, and no end of the server."""
    file = write(tmp_path, SCHEDULER.format(fault=f"open({str(tmp_path / 'mine.py')!r}, 'w').write('x = (\\n'); os._exit(1)"))
    seen = Seen()

    async def work() -> None:
        channel = ProcessChannel(fake(parts={"scheduler": file}), progress=seen.said.append)
        async with running(channel) as engine:
            await collect(engine, evil(0))
            await until(lambda: channel.dropped)
            assert (await collect(engine, ask(1))).error is None

    run(work())
    assert f"{file}, line 1: cannot be the part scheduler (stage 10): SyntaxError" in seen.said[-2] + seen.said[-1]


def test_a_stream_ends_and_the_abort_of_it_is_nothing(tmp_path: Path) -> None:
    """A fault in the middle of other answers ends them with the line; leaving them afterwards does no harm."""
    file = write(tmp_path, SCHEDULER.format(fault="raise ValueError"))

    async def work() -> None:
        channel = ProcessChannel(fake(parts={"scheduler": file}))
        async with running(channel) as engine:
            async with aclosing(engine.generate(ask(0, max_tokens=400))) as outputs:
                await anext(outputs)
                assert "ValueError" in ((await collect(engine, evil(1))).error or "")
                rest = [output async for output in outputs]
                assert "ValueError" in (rest[-1].error or "")
            assert (await collect(engine, ask(2))).error is None
            assert engine.num_active == 0

    run(work())


def test_faults_are_counted_by_who_can_have_been_it() -> None:
    faults = Faults({"scheduler": "s.py", "blocks": "b.py"})
    assert [faults.note(["scheduler", "blocks"], "x"), faults.note(["scheduler"], "x"), faults.note([], "x")] == [[], [], []]
    assert [faults.note(["scheduler"], "y"), faults.note(["scheduler"], "z")] == [[], ["scheduler"]]
    assert faults.kept == {"blocks": "b.py"}
    assert faults.note(["scheduler"], "z") == []
