"""`.progress.json`: what is banked, measured, peeked at and predicted, by track; what shared stages bank counts on both.

    progress = load()
    with changing() as progress:        # under a lock; written whole or not at all
        progress.bank(stage, "torch", ...)

A file that is damaged, or that this program did not write, is set aside beside it and said; it is never overwritten.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from course.runner.checking import Measure, Result
from course.runner.declaration import ROOT, TRACKS, Stage, Track, ladder
from course.runner.problems import Problem
from course.runner.terminal import warn

PATH = ROOT / ".progress.json"
VERSION = 1
BOOKS = ("shared", *TRACKS)
KEPT = ("banked", "best", "last", "peeks", "predictions")  # each: stage id -> what is kept of it


def empty() -> dict[str, Any]:
    return {"version": VERSION, "track": "torch"} | {book: {kept: {} for kept in KEPT} for book in BOOKS}


def sound(told: Any) -> bool:
    """Whether it has the shape that everything here relies on."""
    if not isinstance(told, dict) or told.get("version") != VERSION or told.get("track") not in TRACKS:
        return False
    for book in BOOKS:
        if not isinstance(told.get(book), dict):
            return False
        for kept in KEPT:
            shelf = told[book].get(kept)
            kind = list if kept in ("peeks", "predictions") else dict
            if not isinstance(shelf, dict) or not all(isinstance(entry, kind) for entry in shelf.values()):
                return False
    return all(_banked(e) for b in BOOKS for e in told[b]["banked"].values())


def _banked(entry: dict[str, Any]) -> bool:
    return (
        isinstance(entry.get("at"), int | float)
        and isinstance(entry.get("sha256"), str)
        and isinstance(entry.get("provisional"), bool)
    )


def sha256(path: Path) -> str:
    """Of a file; "" where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


class Progress:
    def __init__(self, told: dict[str, Any]):
        self.told = told

    @property
    def track(self) -> Track:
        return self.told["track"]

    def shelf(self, kept: str, stage: Stage, track: Track) -> dict[str, Any]:
        return self.told["shared" if stage.shared else track][kept]

    # --- banking

    def banked(self, stage: Stage, track: Track) -> dict[str, Any] | None:
        return self.shelf("banked", stage, track).get(stage.id)

    def bank(self, stage: Stage, track: Track, provisional: bool, commit: str = "", at: float | None = None) -> None:
        entry = {"at": at or time.time(), "commit": commit, "sha256": sha256(stage.file(track)), "provisional": provisional}
        self.shelf("banked", stage, track)[stage.id] = entry

    def changed(self, stage: Stage, track: Track) -> bool:
        """Whether a banked file is not what it was."""
        entry = self.banked(stage, track)
        return entry is not None and entry["sha256"] != sha256(stage.file(track))

    def current(self, track: Track) -> Stage | None:
        """The first stage of this version that is open."""
        return next((s for s in ladder()[1] if s.is_here(track) and self.banked(s, track) is None), None)

    # --- numbers

    def best(self, stage: Stage, track: Track, check: str, measure: Measure) -> float | None:
        entry = self.shelf("best", stage, track).get(stage.id, {})
        value = entry.get(f"{check}/{measure.name}") if isinstance(entry, dict) else None
        return float(value) if isinstance(value, int | float) else None

    def keep(self, stage: Stage, track: Track, results: list[Result], whole: bool) -> None:
        """The numbers of a run of the learner's file; with `whole`, also how the run ended."""
        best = self.shelf("best", stage, track).setdefault(stage.id, {})
        for result in results:
            for m in result.measures if result.verdict == "passed" else ():
                old = self.best(stage, track, result.name, m)
                if m.value == m.value and (old is None or better(m, old) or m.gate[:1] not in "<>"):
                    best[f"{result.name}/{m.name}"] = m.value
        if whole:
            counts = {v: sum(r.verdict == v for r in results) for v in ("passed", "failed", "not measured")}
            self.shelf("last", stage, track)[stage.id] = {"at": time.time()} | counts

    def last_run(self, stage: Stage, track: Track) -> dict[str, Any] | None:
        entry = self.shelf("last", stage, track).get(stage.id)
        return (
            entry
            if entry and all(isinstance(entry.get(k), int | float) for k in ("at", "passed", "failed", "not measured"))
            else None
        )


def better(measure: Measure, than: float) -> bool:
    """Whether a number is further on its gate's good side."""
    return measure.value < than if measure.gate.startswith("<") else measure.gate.startswith(">") and measure.value > than


def _set_aside(why: str) -> None:
    names = (PATH.with_name(f"{PATH.name}.damaged-{n}") for n in itertools.count(1))
    aside = next(path for path in names if not os.path.lexists(path))
    try:
        os.rename(PATH, aside)
    except OSError as error:
        raise Problem(f"{PATH.name} {why}, and it cannot be moved aside: {error.strerror}") from None
    warn(f"{PATH.name} {why}: it is kept as {aside.name}. ./vc resume rebuilds progress from your commits.")


def load() -> Progress:
    """What is kept, or an empty one. Sets a file aside that this program did not write."""
    try:
        raw = PATH.read_bytes()
    except FileNotFoundError:
        return Progress(empty())
    except OSError as error:
        raise Problem(f"{PATH.name} cannot be read: {error.strerror}") from None
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError):
        _set_aside("is damaged")
        return Progress(empty())
    if not sound(told):
        newer = isinstance(told, dict) and isinstance(told.get("version"), int) and told["version"] > VERSION
        _set_aside("was written by a newer version" if newer else "is not what this program writes")
        return Progress(empty())
    return Progress(told)


@contextlib.contextmanager
def changing() -> Generator[Progress]:
    """Progress to change: one process at a time, written whole or not at all. Raises Problem where nothing can be written."""
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        progress = load()
        yield progress
        _write(progress)
    finally:
        os.close(lock)


def _write(progress: Progress) -> None:
    beside = None
    try:
        handle, beside = tempfile.mkstemp(prefix=f"{PATH.name}.", dir=ROOT)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(progress.told, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, PATH)
    except OSError as error:
        if beside is not None:
            with contextlib.suppress(OSError):
                os.unlink(beside)
        raise Problem(f"progress cannot be kept in {ROOT}: {error.strerror}") from None
