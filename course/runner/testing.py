"""`./vc test`: runs the checks of a stage, or of all, as often as one likes, and keeps the numbers."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from course.runner.arguments import Parser, stage_here
from course.runner.checking import Result
from course.runner.declaration import Stage, Track, ladder
from course.runner.environment import has_gpu
from course.runner.predictions import settle
from course.runner.problems import Problem
from course.runner.progress import Progress, changing, load
from course.runner.report import Run, first_to_mend, place, show, totals
from course.runner.session import Job, results
from course.runner.terminal import Screen, figure, warn

LIVE = 0.3  # seconds between two looks of the line that counts


def run_checks(
    stage: Stage, track: Track, origin: str, names: list[str], heard: Callable[[Result, int], None] | None = None
) -> Run:
    """Runs them, exact names; `heard` hears of each result as it comes."""
    began = time.monotonic()
    run = Run(stage, track, origin, gpu=has_gpu())
    for _, result in results(stage, track, origin, [Job(names)]):
        run.results.append(result)
        if heard is not None:
            heard(result, len(names))
    run.seconds = time.monotonic() - began
    return run


def named(stage: Stage, track: Track, word: str | None) -> list[str]:
    """The checks whose name or claim holds `word`; all without one."""
    low = (word or "").lower()
    return [c.name for c in stage.claims(track) if low in c.name.lower() or low in c.claim.lower()]


def keep(run: Run, whole: bool) -> str:
    """Keeps the numbers of a run of the learner's file; answers what a prediction came to, in a line."""
    if run.origin != "app":
        return ""
    try:
        with changing() as progress:
            run.remember(progress)
            progress.keep(run.stage, run.track, run.results, whole)
            return settle(progress, run)
    except Problem as problem:
        warn(str(problem))
        return ""


def counting(screen: Screen) -> Callable[[Result, int], None] | None:
    """One line that counts while checks run; on a terminal alone."""
    if not screen.live:
        return None
    done = 0

    def heard(result: Result, of: int) -> None:
        nonlocal done
        done += 1
        screen.stream.write(f"\r  {done} of {of}\r" if done < of else "\r\x1b[K")
        screen.stream.flush()

    return heard


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("test", "Runs the checks of a stage: of the one you are at, of stage n, or of all.")
    parser.add_argument("stage", nargs="?", metavar="n|all", help="the stage; without it, the one you are at")
    parser.add_argument("-k", metavar="NAME", dest="name", help="only checks whose name or claim holds NAME")
    track = parser.add_mutually_exclusive_group()
    track.add_argument("--jax", action="store_const", const="jax", dest="track", help="the JAX track, for this run")
    track.add_argument("--torch", action="store_const", const="torch", dest="track", help="the torch track, for this run")
    parser.add_argument("--answers", action="store_true", help="on the reference answers in place of your files")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else")
    parser.add_argument("-v", "--verbose", action="store_true", help="every check, every number")
    parser.add_argument("--traceback", action="store_true", help="with the traceback of what failed")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    progress = load()
    track: Track = given.track or progress.track
    origin = "answers" if given.answers else "app"
    every = given.stage == "all"
    stages = [s for s in ladder()[1] if s.is_here(track)] if every else [stage_here(given.stage, track, progress)]
    picked = [(s, names) for s in stages if (names := named(s, track, given.name))]
    if not picked:
        known = "./vc guide n lists those of a stage" if every else f"they are {', '.join(named(stages[0], track, None))}"
        raise Problem(f"no check{'' if every else f' of stage {stages[0].id}'} has {given.name!r} in its name; {known}")
    for stage, _ in picked if origin == "app" else ():
        must_have_file(stage, track)
    if given.json:
        return _as_json(picked, track, origin, given.name is None)
    if every:
        return _all(Screen(), picked, track, origin, given)
    return _one(Screen(), *picked[0], track, origin, given, progress)


def must_have_file(stage: Stage, track: Track) -> None:
    """Raises Problem where the learner's file is gone."""
    if not (path := stage.file(track)).is_file():
        raise Problem(f"there is no app/{path.name}; git brings the stub back: git checkout -- app/{path.name}")


def _one(
    screen: Screen, stage: Stage, names: list[str], track: Track, origin: str, given: argparse.Namespace, progress: Progress
) -> int:
    run = run_checks(stage, track, origin, names, counting(screen))
    predicted = keep(run, given.name is None)
    show(screen, run, given.verbose, given.traceback)
    if predicted:
        screen.say(predicted)
    failed = run.of("failed")
    number = stage.id.lstrip("0")
    if failed:
        if not given.traceback and any(r.traceback and r.reason for r in failed):
            screen.say(screen.dim(f"Traceback: ./vc test {number} -k {failed[0].name} --traceback"))
        if origin == "app":
            screen.next(f"edit {place(first_to_mend(failed)) or run.file}", f", then {screen.bold(f'./vc test {number}')}")
        return 1
    if given.name is not None:
        screen.next(f"./vc test {number}")
    elif origin == "app" and progress.banked(stage, track) is None:
        screen.next("./vc submit" if progress.current(track) == stage else f"./vc submit {number}")
    elif origin == "app":
        screen.next("./vc")
    return 0


def _all(screen: Screen, picked: list[tuple[Stage, list[str]]], track: Track, origin: str, given: argparse.Namespace) -> int:
    every: list[Result] = []
    began = time.monotonic()
    for stage, names in picked:
        run = run_checks(stage, track, origin, names)
        keep(run, given.name is None)
        every += run.results
        if given.verbose or given.traceback:
            show(screen, run, given.verbose, given.traceback)
            screen.say()
            continue
        verdict = (
            "failed" if run.of("failed") else "not measured" if len(run.of("not measured")) == len(run.results) else "passed"
        )
        found = run.number()
        measured = figure(found[1].value, found[1].unit, found[1].gate) if found and found[0].verdict == "passed" else ""
        counts = f"{len(run.of('passed'))} of {len(run.results)}"
        left = f"  {screen.mark(verdict)}{stage.id}  {stage.title}"
        line = screen.pad(left, 42) + counts.rjust(9) + measured.rjust(16)
        screen.say(line + screen.dim(f"{run.seconds:.1f} s".rjust(11)))
    screen.say()
    screen.ends(totals(every), screen.dim(f"{time.monotonic() - began:.1f} s"))
    return int(any(r.verdict == "failed" for r in every))


def _as_json(picked: list[tuple[Stage, list[str]]], track: Track, origin: str, whole: bool) -> int:
    told: list[dict[str, Any]] = []
    for stage, names in picked:
        run = run_checks(stage, track, origin, names)
        if line := keep(run, whole):
            warn(line)
        for r in run.results:
            entry = asdict(r)
            measures = [
                {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in m.items()}
                for m in entry["measures"]
            ]
            reason = ": ".join(t for t in (r.probably, r.reason) if t)
            told.append(entry | {"measures": measures, "reason": reason, "detail": r.reason, "seconds": round(r.seconds, 3)})
    json.dump({"track": track, "checks": told}, sys.stdout, indent=1, allow_nan=False)
    print()
    return int(any(t["verdict"] == "failed" for t in told))
