"""What every kind of model on disk offers: configuration, text assets and weights one at a time under Hugging Face's names."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cutaway.checkpoints import layout
from cutaway.checkpoints.config import ModelConfig
from cutaway.core.text_assets import TextAssets

DType = Literal["f32", "f16", "bf16"]
NUMPY_DTYPE: dict[DType, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
SLICE = 1 << 20  # weights converted at a time: the working copy stays at a few MiB whatever the tensor's size


@dataclass(frozen=True, slots=True)
class Array:
    """One weight. data is C-contiguous in Hugging Face's shape; "bf16" holds the bits as uint16."""

    data: NDArray[np.generic]
    dtype: DType


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Ids that end an answer, the union of all files that name any, and the id that starts a text.

    The temperature and the like that some makers recommend are not read: an API's defaults are those of the API.
    """

    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None


class Checkpoint(Protocol):
    """A model on disk, checked at opening: every tensor is there, in the configuration's shape, within its file."""

    path: Path
    name: str
    kind: Literal["folder", "gguf", "dummy"]
    config: ModelConfig
    generation: GenerationDefaults

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def load(self, name: str, dtype: DType | None = None) -> Array:
        """One weight as `dtype`; None: as stored (quantized: f32). Conversion goes by slices of 2^20 weights."""
        ...

    def text(self) -> TextAssets: ...


def to_bf16(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    """Rounds float32 to bfloat16 bits, to nearest and ties to even; NaN stays NaN. Same shape, `out` is written."""
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    np.bitwise_and(rounded, np.uint32(1), out=rounded)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    out[...] = rounded
    bad = np.isnan(values)
    if bad.any():
        out[bad] = 0x7FC0


def to_f32(values: NDArray[np.generic], dtype: DType) -> NDArray[np.float32]:
    """A float32 copy of stored values ("bf16": bits as uint16)."""
    if dtype == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def store(values: NDArray[np.float32], out: NDArray[np.generic], dtype: DType) -> None:
    """Writes float32 values into `out`, an array of NUMPY_DTYPE[dtype]."""
    if dtype == "bf16":
        to_bf16(np.ascontiguousarray(values), out)  # pyright: ignore[reportArgumentType]
    else:
        out[...] = values


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Cuts [rows, columns] into runs of rows of about SLICE weights."""
    step = max(1, SLICE // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


@dataclass(slots=True)
class DummyCheckpoint:
    """Weights that stand for a model of any size: uniform in ±1e-3, seeded by name, norms one. For measuring speed."""

    config: ModelConfig
    assets: TextAssets
    path: Path
    name: str = "dummy"
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    kind: Literal["folder", "gguf", "dummy"] = "dummy"

    def names(self) -> list[str]:
        return list(layout.tensors(self.config))

    def shape(self, name: str) -> tuple[int, ...]:
        return layout.tensors(self.config)[name]

    def load(self, name: str, dtype: DType | None = None) -> Array:
        dtype = dtype or self.config.dtype
        shape = self.shape(name)
        out = np.empty(shape, NUMPY_DTYPE[dtype])
        if name.endswith("norm.weight"):
            store(np.ones(shape, np.float32), out, dtype)
            return Array(out, dtype)
        random = np.random.default_rng(zlib.crc32(name.encode()))
        flat = out.reshape(-1)
        for part in row_slices(flat.size, 1):
            values = random.random(part.stop - part.start, np.float32)
            store((values - np.float32(0.5)) * np.float32(2e-3), flat[part], dtype)
        return Array(out, dtype)

    def text(self) -> TextAssets:
        return self.assets
