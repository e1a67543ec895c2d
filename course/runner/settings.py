"""`./vc backend`, `./vc reset`, `./vc book`."""

from __future__ import annotations

from course.runner.arguments import Parser, stage_named
from course.runner.declaration import TRACKS, ladder
from course.runner.problems import Refused
from course.runner.progress import changing, load
from course.runner.terminal import Screen


def main(verb: str, arguments: list[str]) -> int:
    return {"backend": backend, "reset": reset, "book": book}[verb](arguments)


def backend(arguments: list[str]) -> int:
    parser = Parser("backend", "Shows the track, or switches it. Progress is kept by track; shared stages count on both.")
    parser.add_argument("track", nargs="?", choices=TRACKS)
    given = parser.parse_args(arguments)
    screen = Screen()
    if given.track is None:
        screen.say(f"{load().track} track")
        return 0
    with changing() as progress:
        progress.told["track"] = given.track
    screen.say(f"{given.track} track")
    missing = [s for s in ladder()[1] if s.is_here("torch") and not s.is_here(given.track)]
    if missing:
        ids = ", ".join(s.id for s in missing)
        screen.paragraph(f"Not in this version yet on this track: {ids}. The shared stages are: they count on both tracks.", "")
    screen.next("./vc")
    return 0


def reset(arguments: list[str]) -> int:
    parser = Parser("reset", "Reopens stage n and all later ones. Your files stay as they are, and so do your best numbers.")
    parser.add_argument("stage", metavar="n")
    first = stage_named(parser.parse_args(arguments).stage)
    screen = Screen()
    with changing() as progress:
        track = progress.track
        reopened = [s for s in ladder()[1] if s.id >= first.id and progress.banked(s, track) is not None]
        for s in reopened:
            del progress.shelf("banked", s, track)[s.id]
        for s in ladder()[1]:
            if s.id >= first.id:
                progress.shelf("last", s, track).pop(s.id, None)
    if not reopened:
        screen.say(f"Nothing from stage {first.id} on is banked.")
        return 0
    shared = [s.id for s in reopened if s.shared]
    screen.say(f"Open again: {', '.join(s.id for s in reopened)}. Your files are as they were.")
    if shared:
        screen.say(screen.dim(f"Shared, so open on both tracks: {', '.join(shared)}."))
    screen.next("./vc")
    return 0


def book(arguments: list[str]) -> int:
    Parser("book", "The book, in a browser.").parse_known_args(arguments)
    raise Refused("the book is not in this version yet")
