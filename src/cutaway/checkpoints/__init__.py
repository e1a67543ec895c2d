"""Models on disk: find one, open it, read its configuration, text assets and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cutaway.checkpoints.checkpoint import Array, Checkpoint, DummyCheckpoint, GenerationDefaults
from cutaway.checkpoints.folder import FolderCheckpoint, open_dummy
from cutaway.checkpoints.gguf import GGUFCheckpoint
from cutaway.core.errors import CheckpointError

__all__ = ["Array", "Checkpoint", "DummyCheckpoint", "GenerationDefaults", "open_checkpoint", "resolve"]


def resolve(model: str) -> Path:
    """The path of a model: see `hub.resolve`."""
    from cutaway.checkpoints import hub  # here, so that `python -m cutaway.checkpoints.hub` finds the module not yet loaded

    return hub.resolve(model)


def open_checkpoint(path: Path, load_format: Literal["auto", "dummy"] = "auto") -> Checkpoint:
    """Opens a .gguf file (or a folder with just one) or a Hugging Face folder: headers are read and checked, weights are not.

    load_format "dummy": random weights for a folder's config.json. CheckpointError in one line for whatever is wrong.

    >>> checkpoint = open_checkpoint(resolve("smollm2-135m-instruct"))
    >>> checkpoint.load("model.norm.weight").data.shape
    (576,)
    """
    if load_format == "dummy" and (path.is_dir() or path.suffix == ".json"):
        return open_dummy(path)
    if path.is_dir():
        if (path / "config.json").exists():
            return FolderCheckpoint(path)
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            hint = f"; give the path of one of its {len(files)} .gguf files" if files else ""
            raise CheckpointError(f"{path}: has no config.json, so it is not a model's folder{hint}")
        return GGUFCheckpoint(files[0])
    if path.is_file():
        return GGUFCheckpoint(path)
    raise CheckpointError(f"{path}: no such file or folder; give the path of a .gguf file or of a folder with config.json")
