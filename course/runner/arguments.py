"""How a verb reads its arguments: a mistake is one line that says what to do."""

from __future__ import annotations

import argparse
from typing import NoReturn

from course.runner.declaration import Stage, Track, ladder, stage
from course.runner.problems import Problem, Refused
from course.runner.progress import Progress


class Parser(argparse.ArgumentParser):
    def __init__(self, verb: str, description: str):
        super().__init__(prog=f"./vc {verb}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise Problem(f"{message}; {self.prog} --help lists what there is")


def stage_named(word: str) -> Stage:
    """Any declared stage, by number or name."""
    try:
        return stage(word)
    except KeyError:
        stages = ladder()[1]
        raise Problem(f"there is no stage {word!r}; they are 1 to {len(stages)}, ./vc list shows them") from None


def stage_here(word: str | None, track: Track, progress: Progress) -> Stage:
    """A stage that this version has, by number or name; without one, where the learner is."""
    if word is None:
        found = progress.current(track)
        if found is None:
            raise Refused("every stage of this version is banked; name one, such as ./vc test 6")
        return found
    found = stage_named(word)
    if not found.is_here(track):
        raise Refused(not_here(found, track))
    return found


def not_here(stage: Stage, track: Track) -> str:
    if track == "jax" and stage.is_here("torch"):
        return f"stage {stage.id} on the JAX track is not in this version yet; ./vc backend torch has it"
    return f"stage {stage.id}, {stage.title}, is not in this version yet; ./vc list shows what is"
