"""Runs the checks of a stage in this process: `python course/runner/worker.py 6 --answers`.

The runner (`session.py`) starts this in a process of its own, because what it runs is somebody's unfinished work: it may loop
for ever, take all memory, or end the process. With `--serve` the first line of stdin says what to run, and stdout is one JSON
object a line: {"loading": job}, {"begin": name, "seconds": s}, {"result": {...}}, {"end": true}. What checked code prints goes
to stderr. When stdin closes, whoever asked is gone, and this process ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: the checkout is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # times are this process's CPU time: one thread makes them mean something

import contextlib
import importlib
import importlib.util
import json
import linecache
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from types import ModuleType
from typing import Any, NoReturn

from course.runner.checking import Check, Failed, Lab, NotMeasured, Result, checks_of
from course.runner.declaration import ROOT, Stage, Track, stage
from course.runner.environment import has_gpu
from course.runner.faults import Fault, answer_path, faults_of
from course.runner.watching import watch

TRIES = 3  # of a check that a busy machine kept from a verdict
NOT_WRITTEN = "this is not written yet"
NOT_IMPORTED = "the file cannot be imported"
NO_TRITON = "no triton here: it exists for Linux alone"
SLOW = 2.0  # seconds; a check that took longer is not run again to see where it went


def load(path: Path, name: str, source: str | None = None) -> ModuleType:
    """A module from a file; from `source` in its place, if given. Raises whatever it raises. Never from a cache: Python's own
    does not see an edit of the same length within the second."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    linecache.cache.pop(str(path), None)
    if source is not None:  # Triton compiles a kernel from its source, which it asks for by the file's name
        linecache.cache[str(path)] = len(source), None, source.splitlines(keepends=True), str(path)
    exec(compile(path.read_bytes() if source is None else source, str(path), "exec"), module.__dict__)
    return module


def under_test(stage: Stage, track: Track, origin: str, fault: Fault | None = None) -> ModuleType:
    """The module that the checks are to judge. origin: "app" or "answers"."""
    path, name = stage.file(track) if origin == "app" else answer_path(stage, track), f"{origin}_{stage.name}_{track}"
    if fault is not None and fault.file:
        return under_fault(path, name, fault)
    return load(path, name, fault.apply(path.read_text(encoding="utf-8")) if fault is not None else None)


def under_fault(path: Path, name: str, fault: Fault) -> ModuleType:
    """An answer that imports the engine's functions from a file with the fault in it. The engine itself keeps its own."""
    edited = ROOT / fault.file
    engines = ".".join(edited.relative_to(ROOT / "src").with_suffix("").parts)
    right = importlib.import_module(engines)
    load(edited, engines, fault.apply(edited.read_text(encoding="utf-8")))
    try:
        return load(path, name)
    finally:
        sys.modules[engines] = right


def where(error: BaseException, path: Path) -> str:
    """The deepest line of the file under test that `error` passed through."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__  # Triton's wraps what went wrong inside a kernel
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename) == path:
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return ""


def said(error: BaseException) -> str:
    """Its kind and its text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def on_purpose(at: str) -> bool:
    """Whether a line raises by itself: then it says what went wrong, and the check's own guess stands beside it."""
    name, _, line = at.rpartition(":")
    return linecache.getline(str(ROOT / name), int(line)).strip().startswith(("raise ", "assert ")) if name else False


def device() -> str:
    if not has_gpu():
        return "cpu"  # said without loading torch, which half of the stages do without
    import torch

    return "cuda" if torch.cuda.is_available() and not os.environ.get("CUTAWAY_CPU") else "cpu"


def lacking(check: Check, on: str) -> str:
    """Why a check cannot be measured here, or ""."""
    if check.needs == "gpu" and on == "cpu":
        return "needs a GPU, and this machine has none"
    if check.needs == "triton" and importlib.util.find_spec("triton") is None:
        return NO_TRITON
    return ""


def run_check(check: Check, stage_id: str, module: object, on: str, path: Path, begin: Callable[[Check], None]) -> Result:
    """One check, asked again while the machine is too busy for a verdict; `begin` hears of each try."""
    began = time.perf_counter()
    result = Result(stage_id, check.name, check.claim, "passed")
    if reason := lacking(check, on):
        result.verdict, result.reason = "not measured", reason
        return result
    for attempt in range(TRIES):
        begin(check)
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
            if not result.where and failed.__context__ is not None:
                result.where = where(failed.__context__, path)  # an error of theirs whose text lacks something
            if not result.where and time.perf_counter() - began < SLOW:
                seen = watch(check, Lab(stage_id, module, check, on), path, failed.called)
                result.where, result.ran = seen.where, seen.ran
            break
        except (Exception, SystemExit) as error:
            result.verdict, result.where, result.traceback = "failed", where(error, path), traceback.format_exc()
            if isinstance(error, NotImplementedError):
                result.probably, result.reason = NOT_WRITTEN, ""
            else:
                _unexpected(result, error, check, path)
                if not result.where and time.perf_counter() - began < SLOW:
                    seen = watch(check, Lab(stage_id, module, check, on), path, False)
                    result.where, result.ran = seen.where, seen.ran
                    if seen.empty and "None" in str(error):
                        result.probably, result.reason = "", f"{seen.empty} answered None"
            break
    result.seconds = time.perf_counter() - began
    return result


def _unexpected(result: Result, error: BaseException, check: Check, path: Path) -> None:
    """An exception that the check did not ask for. One of the file's own says more than what a failed claim usually means."""
    frames = [f.name for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    if isinstance(error, AssertionError) and frames[-1:] == ["check"]:  # it looked, and something else has gone wrong
        result.where, result.probably = "", check.probably
        result.reason = f"your check() says: {error}" if str(error) else "your check() finds something wrong"
        return
    result.reason, result.raised = said(error), bool(result.where)
    result.probably = "" if result.raised and not on_purpose(result.where) else check.probably


def run_stage(
    stage: Stage, track: Track, origin: str, names: Iterable[str] = (), fault: Fault | None = None
) -> Iterator[Result]:
    """The checks of a stage, or those whose name or claim holds one of `names`."""
    checks = checks_of(load(stage.checks_file(track), f"checks_{stage.name}_{track}"))
    wanted = [c for c in checks if not list(names) or any(n in c.name or n in c.claim for n in names)]
    yield from run_checks(stage, track, origin, wanted, fault, lambda check: None)


def run_checks(stage: Stage, track: Track, origin: str, checks: list[Check], fault: Fault | None,
               begin: Callable[[Check], None]) -> Iterator[Result]:  # fmt: skip
    """Each check's result. `begin` hears of each before it runs, and before it is tried again."""
    on = device()
    if on == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it once, when the module under test imports it
        # NumPy warns of the NaN and inf that a kernel works on: what a GPU does silently
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    path = stage.file(track) if origin == "app" else answer_path(stage, track)
    try:
        module = under_test(stage, track, origin, fault)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            for c in checks:
                yield Result(stage.id, c.name, c.claim, "not measured", reason=NO_TRITON)
            return
        line = getattr(error, "lineno", None)
        at = f"{path.relative_to(ROOT)}:{line}" if line else where(error, path)
        why = said(error)
        for c in checks:
            yield Result(stage.id, c.name, c.claim, "failed", reason=why, probably=NOT_IMPORTED, where=at,
                         traceback=traceback.format_exc())  # fmt: skip
        return
    for c in checks:
        yield run_check(c, stage.id, module, on, path, begin)


def leave_with_the_asker() -> None:
    """Ends this process, and what it started, when stdin closes."""
    asker = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def wait() -> None:
        while os.read(asker, 4096):
            pass
        os.killpg(0, 9) if os.getpgid(0) == os.getpid() else os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def serve() -> NoReturn:
    """Runs the jobs that one line of stdin names: {stage, track, origin, jobs: [{fault, names}]}."""
    asked = json.loads(sys.stdin.readline())
    leave_with_the_asker()
    out = os.dup(1)
    os.dup2(2, 1)  # what checked code prints is no part of the protocol

    def say(**told: Any) -> None:
        line = json.dumps(told).encode() + b"\n"
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()  # what was printed so far is seen before what came of it
        try:
            while line:
                line = line[os.write(out, line) :]
        except BrokenPipeError:
            os._exit(0)  # whoever asked has heard enough

    chosen, track = stage(asked["stage"]), asked["track"]
    say(loading=-1)
    checks = {c.name: c for c in checks_of(load(chosen.checks_file(track), f"checks_{chosen.name}_{track}"))}
    planted = {f.name: f for f in faults_of(chosen, track)}
    for job, work in enumerate(asked["jobs"]):
        say(loading=job)
        wanted = [checks[n] for n in work["names"]]
        fault = planted[work["fault"]] if work["fault"] else None
        for result in run_checks(chosen, track, asked["origin"], wanted, fault, lambda c: say(begin=c.name, seconds=c.seconds)):
            say(result=asdict(result))
    say(end=True)
    sys.stdout.flush()
    os._exit(0)  # threads that checked code left behind do not keep anybody waiting


def main(arguments: list[str]) -> int:
    """For those who write checks: `worker.py STAGE [--answers] [--faults] [name ...]`. --faults prints which checks fail."""
    if arguments == ["--serve"]:
        try:
            serve()
        except BaseException as error:  # ours, or a KeyboardInterrupt that checked code raises: the runner says what it meant
            if os.environ.get("CUTAWAY_DEBUG") == "1":
                raise
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
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
        why = f"{r.probably and 'probably: ' + r.probably} {r.reason} {r.where}"
        print(f"{r.verdict:12} {r.seconds:6.2f} s  {r.claim:40} {numbers} {why}")
        if "--traceback" in flags and r.traceback:
            print(r.traceback)
        bad += r.verdict == "failed"
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
