"""`./vc peek`: the reference answer of a stage, which is the engine's own source wherever it can be. It is recorded."""

from __future__ import annotations

import ast
import contextlib
import itertools
import shutil
import time
from pathlib import Path

from course.runner.arguments import Parser, stage_here
from course.runner.declaration import ROOT, Stage, Track, ladder
from course.runner.guide import engine_file, public_names
from course.runner.problems import Problem
from course.runner.progress import changing, load
from course.runner.terminal import Screen, warn


def main(arguments: list[str]) -> int:
    parser = Parser(
        "peek", "The reference answer of a stage: all of it, or one class or function. What you look at is recorded."
    )
    parser.add_argument("stage", nargs="?", metavar="n", help="the stage; without it, the one you are at")
    parser.add_argument("name", nargs="?", help="one class or function, such as BlockTable or BlockTable.slot")
    parser.add_argument("--apply", action="store_true", help="put it into your file, after a backup of what is there")
    given = parser.parse_args(arguments)
    if given.stage is not None and given.name is None and not _is_stage(given.stage):
        given.stage, given.name = None, given.stage
    progress = load()
    track = progress.track
    stage = stage_here(given.stage, track, progress)
    if given.apply and given.name is not None:
        raise Problem("--apply puts the whole file in place; leave the name out")
    sources = [_excerpt(path, given.name) for path in _files(stage, track)]
    if not any(sources):
        raise Problem(f"stage {stage.id} has no {given.name}; it has {', '.join(public_names(ROOT / stage.answers[track]))}")
    backup = _apply(stage, track) if given.apply else ""
    _record(stage, track, given.name, given.apply)
    screen = Screen()
    if given.apply:
        screen.say(
            f"app/{stage.file(track).name} is now the reference answer."
            + (f" Yours is kept as app/{backup}." if backup else "")
        )
        screen.next(f"./vc test {stage.id.lstrip('0')}")
        return 0
    for path, source in zip(_files(stage, track), sources, strict=True):
        if source:
            screen.say(screen.dim(f"# {path.relative_to(ROOT)}"))
            screen.say(source)
    return 0


def _is_stage(word: str) -> bool:
    return any(word in (s.id, s.id.lstrip("0"), s.name) for s in ladder()[1]) or word.isdigit()


def _files(stage: Stage, track: Track) -> list[Path]:
    """The answer, and the engine's own file where that is another."""
    answer = ROOT / stage.answers[track]
    own = ROOT / "src" / "cutaway" / engine_file(stage, track) if stage.part else answer
    return [answer] if own == answer or not own.is_file() else [answer, own]


def _excerpt(path: Path, name: str | None) -> str:
    """The source of a file, or of one thing in it ("" where it has no such thing)."""
    text = path.read_text(encoding="utf-8")
    if name is None:
        return text
    body: list[ast.stmt] = ast.parse(text).body
    found: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None = None
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((n for n in body if isinstance(n, kinds) and n.name == part), None)
        if found is None:
            return ""
        body = found.body
    assert found is not None
    first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : found.end_lineno])


def _apply(stage: Stage, track: Track) -> str:
    """Puts the answer into the learner's file; answers the backup's name, "" where there was nothing."""
    target, answer = stage.file(track), ROOT / stage.answers[track]
    backup = ""
    try:
        for n in itertools.count(1) if target.is_file() else ():
            backup = f"{target.name}.bak-{n}"
            with contextlib.suppress(FileExistsError), open(target.with_name(backup), "xb") as file:
                file.write(target.read_bytes())
                break
        shutil.copyfile(answer, target)
    except OSError as error:
        raise Problem(f"cannot write to {target.parent}: {error.strerror}") from None
    return backup


def _record(stage: Stage, track: Track, name: str | None, applied: bool) -> None:
    try:
        with changing() as progress:
            entry = {"at": time.time(), "what": name or "", "applied": applied}
            progress.shelf("peeks", stage, track).setdefault(stage.id, []).append(entry)
    except Problem as problem:
        warn(str(problem))
