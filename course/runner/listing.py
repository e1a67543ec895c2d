"""`./vc` and `./vc list`: where you are, and the whole ladder."""

from __future__ import annotations

import textwrap
import time

from course.runner.arguments import Parser
from course.runner.declaration import Arc, Stage, Track, ladder
from course.runner.environment import has_gpu
from course.runner.progress import Progress, load
from course.runner.terminal import WIDTH, Screen, ago

TITLES = 26  # columns of an arc's title in the status


def main(verb: str, arguments: list[str]) -> int:
    if verb == "status":
        Parser("", "Where you are.").parse_args(arguments)
        status(Screen(), load())
    else:
        Parser("list", "The whole ladder: arcs, stars, what is banked, provisional, open.").parse_args(arguments)
        whole(Screen(), load())
    return 0


def state(stage: Stage, track: Track, progress: Progress, here: Stage | None) -> str:
    """Its mark: banked, provisional, here, open, or not in this version."""
    entry = progress.banked(stage, track)
    if entry is not None:
        return "○" if entry["provisional"] else "✓"
    return "▸" if stage == here else "·" if stage.is_here(track) else " "


def paint(screen: Screen, mark: str) -> str:
    """With its space."""
    code = {"✓": 32, "○": 33, "▸": 1}.get(mark, 2)
    return screen.paint(mark, code) + " " * ((2 if screen.utf8 else 3) - screen.length(mark))


def counts(progress: Progress, track: Track) -> str:
    entries = [e for s in ladder()[1] if (e := progress.banked(s, track)) is not None]
    provisional = sum(e["provisional"] for e in entries)
    stages = ladder()[1]
    here = sum(s.is_here(track) for s in stages)
    later = f" ({len(stages)} in all)" if here < len(stages) else ""
    return f"ladder {len(entries)} of {here}{later}" + (f", {provisional} provisional" if provisional else "")


def status(screen: Screen, progress: Progress) -> None:
    track = progress.track
    here = progress.current(track)
    arcs, stages = ladder()
    screen.say(f"{screen.bold('Cutaway')}   {track} track   {counts(progress, track)}")
    screen.say()
    for arc in arcs:
        cells = (f"{s.id} {paint(screen, state(s, track, progress, here))}" for s in stages if s.arc == arc.id)
        screen.say(f"  {arc.id} {arc.title:<{TITLES - 4}}  {'  '.join(cells)}")
    screen.say()
    screen.say(screen.dim("  ✓ banked   ○ provisional, GPU part not measured   ▸ you are here   · open"))
    if any(not s.is_here(track) for s in stages):
        screen.say(screen.dim("  without a mark: not in this version yet"))
    screen.say()
    _notes(screen, progress, track)
    if here is None:
        screen.say("Every stage of this version is banked.")
        screen.next("./vc serve", "   your own files in the running engine")
        return
    number = here.id.lstrip("0")
    screen.paragraph(f"You are at stage {here.id}, {here.title}. Your file: app/{here.file(track).name}", indent="")
    last = progress.last_run(here, track)
    if last is None:
        screen.next(f"./vc guide {number}")
        return
    total = int(last["passed"] + last["failed"] + last["not measured"])
    screen.say(f"Last run {ago(last['at'], time.time())}: {int(last['passed'])} of {total} passed.")
    green = not last["failed"] and last["passed"]
    screen.next("./vc submit" if green else f"./vc test {number}")


def _notes(screen: Screen, progress: Progress, track: Track) -> None:
    """What is banked and asks for a look."""
    stages = ladder()[1]
    for s in stages:
        entry = progress.banked(s, track)
        if entry and progress.changed(s, track):
            screen.paragraph(
                f"Stage {s.id}: app/{s.file(track).name} has changed since it was banked: ./vc test {s.id.lstrip('0')}", ""
            )
        elif entry and entry["provisional"] and has_gpu():
            screen.paragraph(f"Stage {s.id} is provisional, and there is a GPU here: ./vc submit {s.id.lstrip('0')}", "")
    peeked = [s.id for s in stages if progress.shelf("peeks", s, track).get(s.id)]
    if peeked:
        screen.say(screen.dim(f"Peeked at: {', '.join(peeked)}."))


def whole(screen: Screen, progress: Progress) -> None:
    track = progress.track
    here = progress.current(track)
    arcs, stages = ladder()
    screen.ends(f"{screen.bold('The ladder')}   {track} track", screen.dim(counts(progress, track)))
    for arc in arcs:
        _arc(screen, arc)
        for s in stages:
            if s.arc == arc.id:
                _line(screen, s, track, progress, here)
    screen.next("./vc guide" if here is not None else "./vc serve")


def _arc(screen: Screen, arc: Arc) -> None:
    screen.say()
    screen.say(screen.bold(f"{arc.id}  {arc.title}"))
    for line in textwrap.wrap(arc.sentence, WIDTH - 4):
        screen.say(screen.dim(f"    {line}"))


def _line(screen: Screen, s: Stage, track: Track, progress: Progress, here: Stage | None) -> None:
    mark = state(s, track, progress, here)
    left = f"  {paint(screen, mark)}{s.id}  {s.title:<33}{screen.stars(s.stars)}"
    many = len(s.claims(track))
    notes = [f"{many} checks" if many else "not in this version yet"]
    entry = progress.banked(s, track)
    if entry is not None:
        notes.append("provisional" if entry["provisional"] else "changed" if progress.changed(s, track) else "banked")
    elif s == here:
        notes.append("you are here")
    peeks = [p for p in progress.shelf("peeks", s, track).get(s.id, []) if isinstance(p, dict)]
    if peeks:
        notes.append("answer applied" if any(p.get("applied") for p in peeks) else "peeked")
    screen.say(f"{left}  {screen.dim(', '.join(notes))}")
