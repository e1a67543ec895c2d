"""Planted faults: wrong answers that people really write, as edits of the reference answer.

`course/faults/s06_blocks.toml` holds, for each:

    [[fault]]
    name = "a double free goes through"
    caught_by = ["double_free_raises"]          # every check that must fail; `verify` runs the first, `verify --full` all
    find = '''            if self._free[block]:
                raise ValueError(f"block {block} is free already")
    '''
    replace = ""

`find` must occur exactly once in the answer: an answer that changes takes its faults along or says so. Several edits: `edits`,
a list of [find, replace]. Where the answer takes the engine's own functions, `file` names the engine's file to edit.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from course.runner.declaration import COURSE, ROOT, Stage, Track


@dataclass(frozen=True, slots=True)
class Fault:
    stage: str
    name: str
    caught_by: tuple[str, ...]
    edits: tuple[tuple[str, str], ...]
    file: str = ""

    def apply(self, source: str) -> str:
        """The wrong answer. Raises ValueError where an edit does not fit the answer any more."""
        for find, replace in self.edits:
            if source.count(find) != 1:
                raise ValueError(
                    f"stage {self.stage}, fault {self.name!r}: {find!r} occurs {source.count(find)} times in the answer"
                )
            source = source.replace(find, replace)
        return source


def answer_path(stage: Stage, track: Track = "torch") -> Path:
    return ROOT / stage.answers[track]


def faults_of(stage: Stage, track: Track = "torch") -> list[Fault]:
    """The planted faults of a stage."""
    suffix = "" if track == "torch" or stage.shared else "_jax"
    path = COURSE / "faults" / f"{stage.name}{suffix}.toml"
    if not path.is_file():
        return []
    faults: list[Fault] = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("fault", []):
        edits = entry.get("edits") or [(entry["find"], entry["replace"])]
        faults.append(Fault(stage.id, entry["name"], tuple(entry["caught_by"]), tuple((a, b) for a, b in edits),
                            entry.get("file", "")))  # fmt: skip
    return faults
