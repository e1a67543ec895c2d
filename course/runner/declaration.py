"""`stages.toml` and the checks, read without importing them: what the ladder is. Standard library alone."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
COURSE = ROOT / "course"
Track = Literal["torch", "jax"]
TRACKS: tuple[Track, ...] = ("torch", "jax")


@dataclass(frozen=True, slots=True)
class Arc:
    id: str
    title: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A check as its file declares it, without running it."""

    name: str
    claim: str
    gate: str
    unit: str
    needs: str


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. files: the learner's file by track (one name for both where it is shared). answer: path of the reference
    answer from the root; part: the engine's part that it is, or "". number: the check whose figure leads."""

    id: str
    name: str  # s06_blocks: of its folder in course/stages
    title: str
    arc: str
    stars: int
    files: dict[str, str]
    answers: dict[str, str]
    part: str
    chapter: str
    number: str
    why: str
    deliver: str
    measure: str

    @property
    def shared(self) -> bool:
        return len(set(self.files.values())) == 1

    @property
    def folder(self) -> Path:
        return COURSE / "stages" / self.name

    def file(self, track: Track) -> Path:
        return ROOT / "app" / f"{self.files[track]}.py"

    def checks_file(self, track: Track) -> Path:
        return self.folder / ("checks.py" if track == "torch" or self.shared else "checks_jax.py")

    def is_here(self, track: Track) -> bool:
        """Whether this version has the stage on that track."""
        return self.checks_file(track).is_file()

    def claims(self, track: Track) -> list[Claim]:
        return claims_of(self.checks_file(track)) if self.is_here(track) else []


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ""


@cache
def claims_of(path: Path) -> list[Claim]:
    """The checks of a file, in its order: functions under `@check(...)`."""
    claims: list[Claim] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "check":
                given = {k.arg: _literal(k.value) for k in mark.keywords}
                claim = (ast.get_docstring(node) or "").splitlines()
                claims.append(
                    Claim(
                        node.name,
                        claim[0] if claim else node.name,
                        given.get("gate", ""),
                        given.get("unit", ""),
                        given.get("needs", ""),
                    )
                )
    return claims


@cache
def ladder() -> tuple[list[Arc], list[Stage]]:
    """Arcs and stages, in order."""
    with open(COURSE / "stages.toml", "rb") as file:
        told = tomllib.load(file)
    arcs = [Arc(**arc) for arc in told["arc"]]
    stages: list[Stage] = []
    for entry in told["stage"]:
        file, answer = entry.pop("file"), entry.pop("answer", "")
        files = {"torch": file, "jax": entry.pop("jax_file", file)}
        answers = {"torch": answer, "jax": entry.pop("jax_answer", answer)}
        stages.append(Stage(files=files, answers=answers, name=file, **entry))
    return arcs, stages


@cache
def chapters() -> dict[str, str]:
    """Titles of the book's chapters, by id."""
    with open(COURSE / "stages.toml", "rb") as file:
        return tomllib.load(file).get("chapters", {})


def stage(id: str) -> Stage:
    """By "06", "6" or "s06_blocks". Raises KeyError."""
    for each in ladder()[1]:
        if id in (each.id, each.id.lstrip("0"), each.name):
            return each
    raise KeyError(id)
