"""`./vc predict`: a stage's number as you expect it, typed before a run; the run says by how much you were off."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

from course.runner.arguments import Parser, stage_here
from course.runner.checking import Measure
from course.runner.declaration import ladder
from course.runner.problems import Problem, Refused
from course.runner.progress import Progress, changing, load
from course.runner.report import Run
from course.runner.terminal import Screen, figure

UNITS = {"%": "percent", "x": "times"}


def settle(progress: Progress, run: Run) -> str:
    """Puts what was measured beside the open prediction of a stage, if there is one; answers the line that says so."""
    kept: list[Any] = progress.shelf("predictions", run.stage, run.track).get(run.stage.id, [])
    found = run.number()
    if found is None or not kept or not isinstance(last := kept[-1], dict) or "measured" in last:
        return ""
    measure = found[1]
    last |= {"measured": measure.value, "unit": measure.unit}
    measured = figure(measure.value, measure.unit, measure.gate)
    return f"You expected {figure(last['value'], measure.unit)} and measured {measured}: {off(last)}."


def off(prediction: dict[str, Any]) -> str:
    expected, measured = prediction["value"], prediction["measured"]
    if expected == measured:
        return "exact"
    if prediction.get("unit") == "%":
        apart = float(f"{abs(measured - expected):.2g}")
        return f"{figure(apart)} point{'s' * (apart != 1)} off"
    if expected * measured <= 0:
        return f"{figure(abs(measured - expected))} apart"
    return f"{max(expected / measured, measured / expected):.2f} times off"


def read(text: str) -> float:
    match = re.fullmatch(r"\s*(-?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*(?:[a-zA-Z%/ ]*)", text)
    if match is None:
        raise Problem(f"a prediction is a number, such as 12.5, got {text!r}")
    return float(match[1].replace(",", ""))


def main(arguments: list[str]) -> int:
    parser = Parser(
        "predict", "Before a run: the number that leads a stage, as you expect it. Without arguments: lists them all."
    )
    parser.add_argument("stage", nargs="?", metavar="n", help="the stage")
    parser.add_argument("value", nargs="?", help="the number; asked for, with its unit, where it is left out")
    parser.add_argument("--again", action="store_true", help="after it was measured: for another design of yours")
    if any(re.fullmatch(r"-[\d.].*", a) for a in arguments):
        arguments = ["--", *arguments]
    given = parser.parse_args(arguments)
    screen, progress = Screen(), load()
    if given.stage is None:
        return _list(screen, progress)
    stage = stage_here(given.stage, progress.track, progress)
    claim = next((c for c in stage.claims(progress.track) if c.name == stage.number), None)
    if claim is None:
        raise Problem(f"stage {stage.id} has no number to predict")
    number, unit = stage.id.lstrip("0"), UNITS.get(claim.unit, claim.unit)
    measured = progress.best(stage, progress.track, claim.name, Measure(claim.claim, 0.0, claim.unit, claim.gate))
    if measured is not None and not given.again:
        known = figure(measured, claim.unit, claim.gate)
        raise Refused(f"stage {stage.id} has been measured: {known}; --again notes what you expect of another design")
    text = given.value
    if text is None:
        if not sys.stdin.isatty():
            in_what = f", N in {unit}" if unit else ""
            raise Problem(f"type the number as well: ./vc predict {number} N{in_what}")
        text = input(f"{claim.claim}{f' ({unit})' if unit else ''}, as you expect it: ")
    value = read(text)
    with changing() as progress:
        kept = progress.shelf("predictions", stage, progress.track).setdefault(stage.id, [])
        if kept and "measured" not in kept[-1]:
            kept.pop()
        kept.append({"at": time.time(), "value": value})
    screen.say(f"Noted: {claim.claim}, {figure(value, claim.unit)}.")
    if claim.unit == "%" and 0 < abs(value) < 1:
        meant = figure(round(100 * value, 6))
        screen.paragraph(f"This number is in percent: for {meant}% type ./vc predict {number} {meant}", "")
    screen.next(f"./vc test {number}")
    return 0


def _list(screen: Screen, progress: Progress) -> int:
    rows = [
        (s, p)
        for s in ladder()[1]
        for p in progress.shelf("predictions", s, progress.track).get(s.id, [])
        if isinstance(p, dict)
    ]
    if not rows:
        screen.say("No predictions yet.")
        at = progress.current(progress.track)
        screen.next(f"./vc predict {at.id.lstrip('0') if at else 'n'}")
        return 0
    screen.say(screen.dim(f"{'':36}{'expected':>14}{'measured':>14}{'':14}"))
    for stage, p in rows:
        unit = p.get("unit", "")
        measured = figure(p["measured"], unit) if "measured" in p else "not run yet"
        screen.say(
            f"{stage.id}  {stage.title:<32}{figure(p['value'], unit):>14}{measured:>14}  {off(p) if 'measured' in p else ''}"
        )
    return 0
