"""A bounds-checked reader of safetensors files: one, or several under an index.

The format: eight bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, data. Read with `preadv`
into NumPy arrays rather than through the library: it maps files into memory (a file cut short under the map kills the
process), and its NumPy side knows no bfloat16.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from cutaway.checkpoints.checkpoint import NUMPY_DTYPE, Array, DType, row_slices, store, to_f32
from cutaway.checkpoints.disk import ModelFile, read_at, read_into
from cutaway.checkpoints.parse import read_json, short
from cutaway.core.errors import CheckpointError

_DTYPES: dict[str, DType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_MAX_NAMES = 32_768  # of all shards
_MAX_HEADER = 2 << 20  # some 15,000 tensors; parsed JSON takes some twenty times its text


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: offset is from the file's start. dtype is the file's word ("BF16", "F8_E4M3", ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class SafetensorsFile(ModelFile):
    """One file: `entries` by name, and `load`. The descriptor stays open until the object goes."""

    entries: dict[str, Entry]

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}")

    def _parse(self) -> None:
        self.entries = {}
        head = read_at(self.file, self.path, 8, 0)
        if len(head) < 8:
            self._fail("is not a safetensors file: it is empty" if not head else "is not a safetensors file: it is too short")
        length = struct.unpack("<Q", head)[0]
        if length > self.size - 8:
            self._fail(
                f"its header claims {length} bytes, but the file has {self.size}; it is truncated or no safetensors file"
            )
        if length > _MAX_HEADER:
            self._fail(f"its header has {length} bytes; at most {_MAX_HEADER} are allowed")
        try:
            header = json.loads(read_at(self.file, self.path, length, 8), object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: its header is not valid JSON") from error
        if not isinstance(header, dict):
            self._fail("its header is not a JSON object")
        end = 0
        entries = [
            self._entry(name, value, 8 + length)
            for name, value in cast(dict[str, Any], header).items()
            if name != "__metadata__"
        ]
        for entry in sorted(entries, key=lambda e: e.offset):
            if entry.offset < end:
                self._fail(f"tensor {entry.name!r} overlaps the one before it")
            end = entry.offset + entry.nbytes
            self.entries[entry.name] = entry

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            self._fail("its header names a tensor twice")
        return values

    def _entry(self, name: str, value: Any, start: int) -> Entry:
        what = f"tensor {short(name)}"
        if len(name) > 255:
            self._fail(f"{what}... has a name of {len(name)} characters; at most 255 are allowed")
        if not isinstance(value, dict):
            self._fail(f"{what} is not described by an object")
        fields = cast(dict[str, Any], value)
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not isinstance(dtype, str):
            self._fail(f"{what} has no dtype")
        if not _whole_numbers(shape) or len(cast(list[int], shape)) > 8:
            self._fail(f"{what} has a shape that is not a short list of whole numbers")
        if not _whole_numbers(offsets) or len(cast(list[int], offsets)) != 2:
            self._fail(f"{what} has no pair of data_offsets")
        begin, end = cast(list[int], offsets)
        dims = tuple(cast(list[int], shape))
        if end < begin or start + end > self.size:
            self._fail(
                f"{what} lies at {begin}..{end}, but the file has {self.size - start} bytes of data; it is truncated or damaged"
            )
        if dtype in _DTYPES:
            count = np.dtype(NUMPY_DTYPE[_DTYPES[dtype]]).itemsize
            for size in dims:
                count *= size
            if count != end - begin:
                self._fail(f"{what} has {end - begin} bytes, but {dtype} {list(dims)} takes {count}")
        return Entry(name, dims, dtype, start + begin, end - begin)

    def dtype(self, name: str) -> DType:
        """The tensor's dtype; an error that names it if it is none of F32, F16, BF16."""
        word = self.entries[name].dtype
        if word not in _DTYPES:
            self._fail(f"tensor {name!r} has dtype {short(word)}, which is not supported; supported: {', '.join(_DTYPES)}")
        return _DTYPES[word]

    def load(self, name: str, dtype: DType | None = None) -> Array:
        """See `Checkpoint.load`."""
        entry, stored = self.entries[name], self.dtype(name)
        target = dtype or stored
        out = np.empty(entry.shape, NUMPY_DTYPE[target])
        flat = out.reshape(-1)
        if stored == target:
            self._read(entry, 0, flat.view(np.uint8))
            return Array(out, target)
        width = np.dtype(NUMPY_DTYPE[stored]).itemsize
        for part in row_slices(flat.size, 1):
            raw = np.empty((part.stop - part.start) * width, np.uint8)
            self._read(entry, part.start * width, raw)
            store(to_f32(raw.view(NUMPY_DTYPE[stored]), stored), flat[part], target)
        return Array(out, target)

    def _read(self, entry: Entry, offset: int, into: NDArray[np.uint8]) -> None:
        read_into(self.file, self.path, into, entry.offset + offset, f"tensor {entry.name!r}")


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62 for item in cast(list[Any], value)
    )


def open_weights(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the file that holds it, for a folder with model.safetensors or an index of shards."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists():
        return _open_shards(folder, index)
    if single.exists():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.entries, file)
    hint = "; PyTorch's .bin files are not supported" if any(folder.glob("*.bin")) else ""
    raise CheckpointError(f"{folder}: has no model.safetensors{hint}")


def _open_shards(folder: Path, index: Path) -> dict[str, SafetensorsFile]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    names = cast(dict[str, Any], weight_map)
    if len(names) > _MAX_NAMES:
        raise CheckpointError(f"{index}: names {len(names)} tensors; at most {_MAX_NAMES} are allowed")
    files: dict[str, SafetensorsFile] = {}
    for shard in names.values():
        if isinstance(shard, str) and shard in files:
            continue
        # a name with a folder in it could point anywhere on this computer
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index}: names {short(shard)} as a shard; a file name ending in .safetensors is needed")
        if len(files) >= 1024:
            raise CheckpointError(f"{index}: names more than 1024 shards")
        if not (folder / shard).exists():
            raise CheckpointError(f"{index}: names the shard {shard}, which is missing from {folder}")
        files[shard] = file = SafetensorsFile(folder / shard)
        for name in file.entries:
            if names.get(name) != shard:
                raise CheckpointError(f"{folder / shard}: holds tensor {name!r}, which the index places elsewhere")
    for name, shard in names.items():
        if name not in files[shard].entries:
            raise CheckpointError(f"{index}: places tensor {name!r} in {shard}, which does not hold it")
    return {name: files[shard] for name, shard in names.items()}
