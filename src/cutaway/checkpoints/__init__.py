"""Models on disk: find one, open it, read its configuration, text assets and weights."""

from __future__ import annotations

from pathlib import Path

from cutaway.checkpoints.checkpoint import Array, Checkpoint, DummyCheckpoint, GenerationDefaults
from cutaway.checkpoints.gguf import GGUFCheckpoint
from cutaway.checkpoints.hub import resolve
from cutaway.core.errors import CheckpointError

__all__ = ["Array", "Checkpoint", "DummyCheckpoint", "GenerationDefaults", "open_checkpoint", "resolve"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a .gguf file or a Hugging Face folder. Headers are read and checked; weights are not."""
    if path.is_file():
        return GGUFCheckpoint(path)
    raise CheckpointError(f"{path}: no such file or folder; give the path of a .gguf file or of a folder with config.json")
