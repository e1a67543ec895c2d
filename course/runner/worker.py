"""Runs the checks of a stage in this process: `python course/runner/worker.py 6 --answers`.

The runner starts this in a process of its own, because what it runs is somebody's unfinished work: it may loop for ever,
take all memory, or end the process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: the checkout is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # times are this process's CPU time: one thread makes them mean something

import importlib.util
import time
import traceback
from collections.abc import Iterable
from types import ModuleType

from course.runner.checking import Check, Failed, Lab, NotMeasured, Result, checks_of
from course.runner.declaration import ROOT, Stage, Track, stage
from course.runner.faults import Fault, answer_path, faults_of

TRIES = 3  # of a check that a busy machine kept from a verdict
NOT_WRITTEN = "this is not written yet"


def load(path: Path, name: str, source: str | None = None) -> ModuleType:
    """A module from a file; from `source` in its place, if given. Raises whatever it raises."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if source is None:
        spec.loader.exec_module(module)
    else:
        exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def under_test(stage: Stage, track: Track, origin: str, fault: Fault | None = None) -> ModuleType:
    """The module that the checks are to judge. origin: "app" or "answers"."""
    path = stage.file(track) if origin == "app" else answer_path(stage, track)
    source = fault.apply(path.read_text(encoding="utf-8")) if fault is not None else None
    return load(path, f"{origin}_{stage.name}_{track}", source)


def where(error: BaseException, path: Path) -> str:
    """The deepest line of the file under test that `error` passed through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename) == path:
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return ""


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() and not os.environ.get("CUTAWAY_CPU") else "cpu"


def lacking(check: Check, on: str) -> str:
    """Why a check cannot be measured here, or ""."""
    if check.needs == "gpu" and on == "cpu":
        return "needs a GPU, and this machine has none"
    if check.needs == "triton" and importlib.util.find_spec("triton") is None:
        return "no triton here: it exists for Linux alone"
    return ""


def run_check(check: Check, stage_id: str, module: object, on: str, path: Path) -> Result:
    """One check, asked again while the machine is too busy for a verdict."""
    began = time.perf_counter()
    result = Result(stage_id, check.name, check.claim, "passed")
    if reason := lacking(check, on):
        result.verdict, result.reason = "not measured", reason
        return result
    for attempt in range(TRIES):
        lab = Lab(stage_id, module, check, on)
        result.measures, result.busy = lab.measures, False
        try:
            check.function(lab)
            result.verdict, result.reason = "passed", ""
            break
        except NotMeasured as no:
            result.verdict, result.reason, result.busy = "not measured", no.reason, no.busy
            if not no.busy or attempt == TRIES - 1:
                break
        except Failed as failed:
            result.verdict, result.probably, result.reason = "failed", failed.probably, failed.detail
            result.where, result.traceback = where(failed, path), traceback.format_exc()
            break
        except Exception as error:
            result.verdict, result.where, result.traceback = "failed", where(error, path), traceback.format_exc()
            if isinstance(error, NotImplementedError):
                result.probably, result.reason = NOT_WRITTEN, ""
            else:
                result.probably = check.probably
                result.reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            break
    result.seconds = time.perf_counter() - began
    return result


def run_stage(stage: Stage, track: Track, origin: str, names: Iterable[str] = (), fault: Fault | None = None) -> Iterable[Result]:
    """The checks of a stage, or those whose name or claim holds one of `names`."""
    checks = checks_of(load(stage.checks_file(track), f"checks_{stage.name}_{track}"))
    wanted = [c for c in checks if not list(names) or any(n in c.name or n in c.claim for n in names)]
    on = device()
    path = stage.file(track) if origin == "app" else answer_path(stage, track)
    try:
        module: object = under_test(stage, track, origin, fault)
    except Exception as error:
        line = getattr(error, "lineno", None)
        at = f"{path.relative_to(ROOT)}:{line}" if line else where(error, path)
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        for c in wanted:
            yield Result(stage.id, c.name, c.claim, "failed", reason=why, probably="the file cannot be imported", where=at,
                         traceback=traceback.format_exc())  # fmt: skip
        return
    for c in wanted:
        yield run_check(c, stage.id, module, on, path)


def main(arguments: list[str]) -> int:
    """For those who write checks: `worker.py STAGE [--answers] [--faults] [name ...]`. --faults prints which checks fail."""
    import torch

    torch.set_num_threads(1)
    flags = {a for a in arguments if a.startswith("--")}
    which, *names = [a for a in arguments if not a.startswith("--")]
    chosen = stage(which)
    if "--faults" in flags:
        for fault in faults_of(chosen):
            caught = [r.name for r in run_stage(chosen, "torch", "answers", names, fault) if r.verdict == "failed"]
            print("ok  " if set(caught) == set(fault.caught_by) else "DIFF", fault.name, caught)
        return 0
    bad = 0
    for r in run_stage(chosen, "torch", "answers" if "--answers" in flags else "app", names):
        numbers = ", ".join(f"{m.value:.6g}{m.unit and ' ' + m.unit} [{m.gate}]" for m in r.measures)
        print(f"{r.verdict:12} {r.seconds:6.2f} s  {r.claim:40} {numbers} {r.probably and 'probably: ' + r.probably} {r.reason} {r.where}")
        if "--traceback" in flags and r.traceback:
            print(r.traceback)
        bad += r.verdict == "failed"
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
