"""`LLM` with parts that are at fault: one line, and the answer goes on as if the engine's own had played from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from cutaway import LLM, SamplingParams
from cutaway.core.errors import CutawayError

SCHEDULER = """from cutaway.core.scheduler import Scheduler as Own
import sys, time
class Scheduler(Own):
    steps = 0
    def schedule(self):
        Scheduler.steps += 1
        if self.steps == {step}: {fault}
        return super().schedule()
    def apply(self, done):
        finished = super().apply(done)
        if self.steps == {applied}: raise RuntimeError("after the tokens")
        return finished
    def abort(self, id):
        if {abort}: raise RuntimeError("no abort")
        return super().abort(id)
"""
DETOKENIZER = """from cutaway.text.detokenizer import Detokenizer as Own
class Detokenizer(Own):
    pushes = 0
    def push(self, ids):
        self.pushes += 1
        if self.pushes == {push}: raise IndexError("half a character")
        return super().push(ids)
"""
PROMPTS = ["the quick brown fox", "of which there would be some time", "a third"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1, max_tokens=30, ignore_eos=True, seed=4),
    SamplingParams(temperature=0.7, max_tokens=9, ignore_eos=True, seed=5),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama")


def write(folder: Path, text: str, **values: Any) -> str:
    file = folder / "mine.py"
    file.write_text(text.format(**{"step": -1, "fault": "pass", "applied": -1, "abort": False, "push": -1} | values))
    return str(file)


def settings(parts: dict[str, str] | None = None) -> dict[str, Any]:
    return {"dtype": "fp32", "threads": 1, "kv_blocks": 129, "max_num_batched_tokens": 16, "parts": parts or {}}


def told(answers: list[Any]) -> list[Any]:
    return [(a.token_ids, a.text, a.finish_reason, len(a.logprobs or ())) for a in answers]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    with LLM(str(model), **settings()) as llm:
        return told(llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("part", "text", "values", "says"),
    [
        ("scheduler", SCHEDULER, {"step": 1, "fault": "raise ValueError('no')"}, "in schedule (part scheduler, stage 10): Val"),
        ("scheduler", SCHEDULER, {"step": 9, "fault": "raise ValueError('no')"}, "in schedule (part scheduler, stage 10): Val"),
        ("scheduler", SCHEDULER, {"step": 9, "fault": "sys.exit(3)"}, "stage 10): SystemExit: 3"),
        ("scheduler", SCHEDULER, {"step": 9, "fault": "return 5"}, "on what mine.py (part scheduler, stage 10) answered"),
        ("scheduler", SCHEDULER, {"applied": 12}, "line 11, in apply (part scheduler, stage 10): RuntimeError"),
        ("scheduler", SCHEDULER + "    def __init__(self, *a, **k): 1 / 0\n", {}, "in __init__ (part scheduler, stage 10)"),
        ("scheduler", SCHEDULER + "    def add(self, r): 1 / 0\n", {}, "in add (part scheduler, stage 10)"),
        ("detokenizer", DETOKENIZER, {"push": 1}, "line 6, in push (part detokenizer, stage 14): IndexError"),
        ("detokenizer", DETOKENIZER, {"push": 7}, "line 6, in push (part detokenizer, stage 14): IndexError"),
        ("detokenizer", DETOKENIZER + "    def __init__(self, *a): 1 / 0\n", {}, "in __init__ (part detokenizer, stage 14)"),
    ],
)  # fmt: skip
def test_the_answer_goes_on(
    part: str, text: str, values: Any, says: str, model: Path, expected: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Greedy and seeded answers, in the middle of which the fault falls: ids, text and logprobs are those without it."""
    with LLM(str(model), **settings({part: write(tmp_path, text, **values)})) as llm:
        assert told(llm.generate(PROMPTS, PARAMS)) == expected
        line = capfd.readouterr().err
        assert says in line
        assert line.startswith("cutaway: ")
        assert line.endswith(f"; the engine's own {part} goes on\n")
        assert line.count("\n") == 1
        assert list(llm.dropped) == [part]
        assert told(llm.generate(PROMPTS, PARAMS)) == expected
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("part", "text", "values"), [("scheduler", SCHEDULER, {"step": 9, "fault": "raise ValueError"}),
                                                      ("detokenizer", DETOKENIZER, {"push": 9})])  # fmt: skip
def test_what_was_shown_stands(part: str, text: str, values: Any, model: Path, expected: Any, tmp_path: Path) -> None:
    with LLM(str(model), **settings({part: write(tmp_path, text, **values)})) as llm:
        deltas = list(llm.stream(PROMPTS[1], PARAMS[1]))
        assert "".join(d.text for d in deltas) == expected[1][1]
        assert [id for d in deltas for id in d.token_ids] == expected[1][0]
        assert llm.dropped


def test_an_abort_that_fails(model: Path, expected: Any, tmp_path: Path) -> None:
    with LLM(str(model), **settings({"scheduler": write(tmp_path, SCHEDULER, abort=True)})) as llm:
        deltas = llm.stream(PROMPTS[1], PARAMS[1])
        next(deltas)
        deltas.close()
        assert "line 14, in abort" in llm.dropped["scheduler"]
        assert llm.engine.stats().running == 0
        assert told(llm.generate(PROMPTS, PARAMS)) == expected


def test_a_request_that_is_refused_is_no_fault(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, SCHEDULER + "    def add(self, r):\n        from cutaway.core.request import DoesNotFit\n"
                 "        raise DoesNotFit('7 blocks, there are 5')\n")  # fmt: skip
    with LLM(str(model), **settings({"scheduler": file})) as llm:
        with pytest.raises(CutawayError, match="7 blocks"):
            llm.generate(PROMPTS, PARAMS)
        assert llm.dropped == {}


def test_ctrl_c_is_no_fault(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, SCHEDULER, step=9, fault="raise KeyboardInterrupt")
    with LLM(str(model), **settings({"scheduler": file})) as llm, pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("text", [SCHEDULER, "while True: pass\n"])
def test_a_part_that_never_comes_back_ends_the_command(text: str, model: Path, tmp_path: Path) -> None:
    """What was shown stands on standard output; the line is on standard error."""
    file = write(tmp_path, text, step=9, fault="\n            while True: pass")
    command = [sys.executable, "-m", "cutaway.cli", "generate", "--model", str(model), "--raw", "the quick", "--part",
               f"scheduler={file}", "--max-tokens", "40"]  # fmt: skip
    environment = os.environ | {"CUTAWAY_PART_SECONDS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "has not come back for 1 s" in line]
    assert len(lines) == 1
    assert f"{file}, line " in lines[0]
    assert "--reference" in lines[0]
    assert bool(done.stdout) == (text == SCHEDULER)
