"""The engine's verbs, with every banked part replaced by the learner's own file."""

from __future__ import annotations

import itertools
import sys

from course.runner.arguments import stage_named
from course.runner.declaration import Stage, ladder
from course.runner.environment import become
from course.runner.problems import Problem
from course.runner.progress import Progress, load
from course.runner.terminal import warn

WITH_PARTS = ("serve", "chat", "generate")


def parts(progress: Progress, typed: set[str]) -> list[tuple[str, Stage]]:
    """Name and stage of each banked part whose name was not typed, where its file still is."""
    found = [
        (s.part, s)
        for s in ladder()[1]
        if s.part and s.is_here("torch") and progress.banked(s, "torch") and s.part not in typed
    ]
    for name, stage in list(found):
        path = stage.file("torch")
        if not path.is_file():
            warn(f"app/{path.name} is banked and not there: the engine's own {name} runs")
            found.remove((name, stage))
        elif progress.changed(stage, "torch"):
            warn(
                f"app/{path.name} has changed since it was banked: it runs as it is; ./vc test {stage.id.lstrip('0')} checks it"
            )
    return found


def typed_parts(arguments: list[str]) -> set[str]:
    """Names of the parts that a person has given files for."""
    given = [after for before, after in itertools.pairwise(arguments) if before == "--part"]
    given += [a.removeprefix("--part=") for a in arguments if a.startswith("--part=")]
    return {g.partition("=")[0] for g in given}


def shadow_of(value: str) -> str:
    """`--shadow 10` as the engine takes it, NAME=FILE; that itself as it is."""
    if "=" in value:
        return value
    stage = stage_named(value)
    if not stage.part or not stage.is_here("torch"):
        able = ", ".join(s.id.lstrip("0") for s in ladder()[1] if s.part and s.is_here("torch"))
        raise Problem(f"--shadow {value}: stage {stage.id} plays no part in the engine; those that do are {able}")
    if not stage.file("torch").is_file():
        raise Problem(f"--shadow {value}: there is no app/{stage.file('torch').name}")
    return f"{stage.part}={stage.file('torch')}"


def with_shadows(arguments: list[str]) -> tuple[list[str], set[str]]:
    """The arguments with stage numbers after --shadow as files, and the parts beside which they run."""
    told, names, value_next = list[str](), set[str](), False
    for word in arguments:
        option, equals, value = word.partition("=")
        if value_next or (option == "--shadow" and equals):
            shadow = shadow_of(word if value_next else value)
            names.add(shadow.partition("=")[0])
            word = shadow if value_next else f"--shadow={shadow}"
        value_next = word == "--shadow" and not value_next
        told.append(word)
    return told, names


def main(verb: str, arguments: list[str]) -> int:
    own: list[str] = []
    if verb in WITH_PARTS:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        head, beside = with_shadows(arguments[:end])  # a shadow runs beside the engine's own part
        if "--reference" in head:
            head = [a for a in head if a != "--reference"]
        elif not {"--help", "-h"} & set(head):
            own = [o for name, s in parts(load(), typed_parts(head) | beside) for o in ("--part", f"{name}={s.file('torch')}")]
        arguments = head + arguments[end:]
    sys.stdout.flush()
    become("-m", "cutaway.cli", verb, *own, *arguments)
