"""The engine's verbs, with every banked part replaced by the learner's own file."""

from __future__ import annotations

import itertools
import sys

from course.runner.declaration import Stage, ladder
from course.runner.environment import become
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


def main(verb: str, arguments: list[str]) -> int:
    own: list[str] = []
    if verb in WITH_PARTS:
        head = arguments[: arguments.index("--")] if "--" in arguments else arguments
        if "--reference" in head:
            arguments = [a for i, a in enumerate(arguments) if a != "--reference" or i >= len(head)]
        elif not {"--help", "-h"} & set(head):
            own = [o for name, s in parts(load(), typed_parts(head)) for o in ("--part", f"{name}={s.file('torch')}")]
    sys.stdout.flush()
    become("-m", "cutaway.cli", verb, *own, *arguments)
