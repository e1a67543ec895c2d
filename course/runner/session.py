"""Runs checks in a process of their own and answers what came of them, whatever becomes of that process.

    for job, result in results(stage, "torch", "app", [Job(names)]):
        ...

A check that takes longer than its `seconds` is failed and its process ended; so is one during which the process died. The rest
goes on in a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from course.runner.checking import Measure, Result
from course.runner.declaration import ROOT, Stage, Track
from course.runner.environment import INSIDE, SETUP
from course.runner.problems import Refused

IMPORT_SECONDS = 120.0  # torch from a cold disk, at most
WORKER = ROOT / "course" / "runner" / "worker.py"


@dataclass(frozen=True, slots=True)
class Job:
    """Checks to run, by their exact names, on the file as it is or with a planted fault."""

    names: list[str]
    fault: str = ""


class Ended(Exception):
    """The process said nothing more. why: in words."""

    def __init__(self, why: str, probably: str):
        super().__init__(why)
        self.why, self.probably = why, probably


class Worker:
    """One process, and its lines as they come."""

    def __init__(self, asked: dict[str, Any]):
        inside = {"OMP_NUM_THREADS": "1", INSIDE: "1"}
        if asked["origin"] == "answers":
            inside["PYTHONWARNINGS"] = "ignore"  # planted faults divide by zero; a learner's own warnings are worth reading
        self.process = subprocess.Popen([SETUP, "--then", WORKER, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env=os.environ | inside, start_new_session=True)  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(asked).encode() + b"\n")
            self.process.stdin.flush()
        self.out = self.process.stdout.fileno()
        self.buffer = b""
        self.eyes = selectors.DefaultSelector()
        self.eyes.register(self.out, selectors.EVENT_READ)

    def line(self, until: float | None) -> dict[str, Any]:
        """The next line. Raises TimeoutError at `until` (monotonic seconds), Ended when the process has died."""
        while b"\n" not in self.buffer:
            wait = 0.2 if until is None else min(0.2, until - time.monotonic())
            if until is not None and wait <= 0:
                raise TimeoutError
            if self.eyes.select(wait):
                if not (more := os.read(self.out, 1 << 16)):
                    raise self.ended()
                self.buffer += more
            elif self.process.poll() is not None and not self.eyes.select(0):
                raise self.ended()  # somebody that it started still holds its stdout
        raw, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(raw)

    def ended(self) -> Ended:
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return Ended("its process was killed: out of memory?", "it asks for more memory than this machine has")
        if code < 0:
            name = signal.Signals(-code).name
            return Ended(f"its process died of {name}", "an array is read or written past its end, or a C library was misused")
        return Ended(f"it ended the process, with exit code {code}", "os._exit, or a library that ends the process, was called")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.close()

    def stop(self) -> None:
        """As a person's Ctrl-C: a set-up that is at work may end what it started."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.kill()

    def close(self) -> None:
        self.eyes.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.process.wait()


def result_of(told: dict[str, Any]) -> Result:
    measures = [Measure(**m) for m in told.pop("measures")]
    ran = [(name, line) for name, line in told.pop("ran")]
    return Result(**told, measures=measures, ran=ran)


def results(stage: Stage, track: Track, origin: str, jobs: list[Job]) -> Iterator[tuple[Job, Result]]:
    """What came of each check of each job, in order, as it comes. Raises Refused where nothing could be run at all."""
    claims = {c.name: c.claim for c in stage.claims(track)}
    todo = [(job, list(job.names)) for job in jobs if job.names]
    while todo:
        asked = [{"fault": job.fault, "names": names} for job, names in todo]
        worker = Worker({"stage": stage.id, "track": track, "origin": origin, "jobs": asked})
        try:
            yield from _until_it_ends(worker, stage, claims, todo)
            worker.close()
        except BaseException:
            worker.stop()
            raise


def _until_it_ends(
    worker: Worker, stage: Stage, claims: dict[str, str], todo: list[tuple[Job, list[str]]]
) -> Iterator[tuple[Job, Result]]:
    """What one process answers; takes it off `todo`."""
    running, allowed, began, begun = "", 0.0, time.monotonic(), False
    loading = -2
    try:
        while todo:
            told = worker.line(began + allowed if begun else None)
            begun, began = True, time.monotonic()
            if "loading" in told:
                running, allowed, loading = "", IMPORT_SECONDS, told["loading"]
            elif "begin" in told:
                running, allowed = told["begin"], told["seconds"]
            elif "result" in told:
                job, names = todo[0]
                result = result_of(told["result"])
                names.remove(result.name)
                if not names:
                    todo.pop(0)
                running, allowed = "", IMPORT_SECONDS
                yield job, result
        worker.close()
        return
    except TimeoutError:
        worker.kill()
        why = f"did not end within {allowed:.0f} s"
        probably = "an endless loop" if running else "the file loops for ever while it is imported"
    except Ended as ended:
        worker.kill()
        why, probably = ended.why, ended.probably
        if loading < 0:
            raise Refused("" if loading == -2 else "the checks of this stage cannot be loaded") from None
    took = time.monotonic() - began
    job, names = todo[0]
    lost = [running] if running else list(names)
    for name in lost:
        names.remove(name)
        yield job, Result(stage.id, name, claims.get(name, name), "failed", seconds=took, reason=why, probably=probably)
    if not names:
        todo.pop(0)
