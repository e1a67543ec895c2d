"""A bounds-checked reader of GGUF headers: metadata and tensor directory, nothing of the weights.

The format (ggml's docs/gguf.md): magic, version, counts, key-value pairs, tensor infos, padding, data. Every count and
length is checked against what is left of the file before anything is allocated, the file is read by `pread` (a file cut
short under a memory map would kill the process), and string arrays are walked, not built: `GGUFHeader.strings` builds one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from cutaway.checkpoints.disk import ModelFile, read_at
from cutaway.core.errors import CheckpointError

Scalar = int | float | bool | str

_MAX_KEYS = 65_536  # a Python object each: bounds memory for files that hold nothing but keys
_MAX_TENSORS = 65_536
_MAX_STRING = 4 << 20
_MAX_TEXT = 16 << 20  # bytes of all strings kept: a Python string may take four bytes for one
_MAX_STRINGS = 3 << 18  # of one array; the largest vocabularies have 2^18 tokens and 2^19 merges
_WINDOW = 1 << 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
# value type -> format, in letters that struct and NumPy share
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}

# type id -> (name, weights a block, bytes a block), as ggml.h has them
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip

# types of intermediate results and of integers, which the gguf package does not dequantize
NOT_WEIGHTS = frozenset({"Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64"})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the directory. shape is in C order (GGUF stores it reversed); offset is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        return GGML_TYPES[self.type][0]


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """Where an array of the metadata lies; `GGUFHeader.strings` and `.numbers` read it."""

    type: int
    count: int
    offset: int


class _Cursor:
    """A position in the file and a window of bytes over it. All reads fail with one line when the file ends first."""

    def __init__(self, file: int, size: int, path: Path):
        self.file, self.size, self.path = file, size, path
        self.position = 0
        self.kept = 0  # bytes of strings handed out
        self._base = 0
        self._window = b""

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}")

    def need(self, count: int, what: str) -> int:
        """Makes `count` bytes at the position available; answers their index in the window."""
        at = self.position - self._base
        if at < 0 or at + count > len(self._window):
            if count > self.size - self.position:
                self.fail(f"the file ends inside {what} (at byte {self.position} of {self.size}); it is truncated or damaged")
            self._window = read_at(self.file, self.path, max(count, _WINDOW), self.position)
            self._base, at = self.position, 0
            if len(self._window) < count:
                self.fail(f"the file became shorter while it was read (inside {what})")
        return at

    def unpack(self, form: str, what: str) -> int | float:
        size = struct.calcsize(form)
        at = self.need(size, what)
        self.position += size
        return struct.unpack_from(form, self._window, at)[0]

    def u32(self, what: str) -> int:
        return int(self.unpack("<I", what))

    def u64(self, what: str) -> int:
        return int(self.unpack("<Q", what))

    def keep(self, length: int, what: str) -> None:
        self.kept += length
        if self.kept > _MAX_TEXT:
            self.fail(f"{what} brings its strings to {self.kept} bytes; at most {_MAX_TEXT} are allowed")

    def string(self, what: str, limit: int = _MAX_STRING) -> str:
        length = self.u64(what)
        if length > limit:
            self.fail(f"{what} claims {length} bytes; at most {limit} are allowed")
        self.keep(length, what)
        at = self.need(length, what)
        self.position += length
        try:
            return self._window[at : at + length].decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def walk_strings(self, count: int, what: str, into: list[str] | None) -> None:
        """Moves over `count` strings, keeping them if asked. The loop is tight: a vocabulary has 10^5 of them."""
        unpack = struct.Struct("<Q").unpack_from
        while count:
            at = self.need(8, what)
            length = unpack(self._window, at)[0]
            if length > _MAX_STRING:
                self.fail(f"{what} holds a string of {length} bytes; at most {_MAX_STRING} are allowed")
            at = self.need(8 + length, what)
            window, last = self._window, len(self._window) - 8
            while count and at <= last:
                end = at + 8 + unpack(window, at)[0]
                if end > len(window):
                    break
                if into is not None:
                    into.append(str(window[at + 8 : end], "utf-8"))
                at = end
                count -= 1
            if into is not None:
                self.keep(self._base + at - self.position, what)  # with their lengths, eight bytes each
            self.position = self._base + at


class GGUFHeader(ModelFile):
    """metadata: key -> scalar, string or ArrayRef. tensors: name -> TensorInfo. The descriptor stays open until `close`."""

    metadata: dict[str, Scalar | ArrayRef]
    tensors: dict[str, TensorInfo]

    def _parse(self) -> None:
        self.metadata, self.tensors = {}, {}
        cursor = self._cursor = _Cursor(self.file, self.size, self.path)
        if self.size < 24:
            cursor.fail(f"is not a GGUF file: {self.size} bytes are less than a header" if self.size else "is empty")
        at = cursor.need(4, "the magic")
        if cursor._window[at : at + 4] != b"GGUF":  # pyright: ignore[reportPrivateUsage]
            cursor.fail("is not a GGUF file (wrong magic)")
        cursor.position = 4
        version = cursor.u32("the version")
        if version in (2 << 24, 3 << 24):
            cursor.fail("is a big-endian GGUF file; convert it to little endian (gguf-convert-endian)")
        if version not in (2, 3):
            cursor.fail(f"has GGUF version {version}; versions 2 and 3 are supported")
        tensors, keys = cursor.u64("the tensor count"), cursor.u64("the key count")
        if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
            cursor.fail(f"claims {tensors} tensors and {keys} keys; at most {_MAX_TENSORS} and {_MAX_KEYS} are allowed")
        for _ in range(keys):
            key = cursor.string("a metadata key", 65_535)
            if key in self.metadata:
                cursor.fail(f"metadata key {key!r} appears twice")
            self.metadata[key] = self._value(key)
        self._directory(tensors)

    def _value(self, key: str) -> Scalar | ArrayRef:
        cursor, what = self._cursor, f"metadata {key!r}"
        kind = cursor.u32(what)
        if kind == _STRING:
            return cursor.string(what)
        if kind in _SCALARS:
            number = cursor.unpack(_SCALARS[kind], what)
            return bool(number) if kind == _BOOL else number
        if kind != _ARRAY:
            cursor.fail(f"{what} has unknown value type {kind}")
        item, count = cursor.u32(what), cursor.u64(what)
        if item != _STRING and item not in _SCALARS:
            cursor.fail(f"{what} is an array of value type {item}; arrays of numbers and strings are supported")
        least = count * (8 if item == _STRING else np.dtype(_SCALARS[item]).itemsize)
        if least > self.size - cursor.position or (item == _STRING and count > _MAX_STRINGS):
            cursor.fail(f"{what} claims {count} elements, more than the file can hold or than is allowed")
        reference = ArrayRef(item, count, cursor.position)
        if item == _STRING:
            cursor.walk_strings(count, what, None)
        else:
            cursor.position += least
        return reference

    def _directory(self, count: int) -> None:
        cursor = self._cursor
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            cursor.fail(f"general.alignment is {str(alignment)[:80]!r}; a power of two up to 2^20 is allowed")
        for _ in range(count):
            info = self._tensor()
            if info.name in self.tensors:
                cursor.fail(f"tensor {info.name!r} appears twice")
            self.tensors[info.name] = info
        start = -(-cursor.position // alignment) * alignment
        end = 0
        for info in sorted(self.tensors.values(), key=lambda t: t.offset):
            if info.offset % alignment:
                cursor.fail(f"tensor {info.name!r} starts at {info.offset}, which is not a multiple of {alignment}")
            if info.offset < end:
                cursor.fail(f"tensor {info.name!r} overlaps the one before it")
            end = info.offset + info.nbytes
            if start + end > self.size:
                cursor.fail(
                    f"tensor {info.name!r} ends at byte {start + end}, but the file has {self.size}; it is truncated or damaged"
                )
            self.tensors[info.name] = TensorInfo(info.name, info.shape, info.type, start + info.offset, info.nbytes)

    def _tensor(self) -> TensorInfo:
        cursor = self._cursor
        name = cursor.string("a tensor's name", 255)
        dims = cursor.u32(f"tensor {name!r}")
        if not 1 <= dims <= 4:
            cursor.fail(f"tensor {name!r} has {dims} dimensions; 1 to 4 are allowed")
        shape = tuple(cursor.u64(f"tensor {name!r}") for _ in range(dims))[::-1]
        kind, offset = cursor.u32(f"tensor {name!r}"), cursor.u64(f"tensor {name!r}")
        if kind not in GGML_TYPES:
            cursor.fail(f"tensor {name!r} has unknown ggml type {kind}")
        type_name, block, nbytes = GGML_TYPES[kind]
        total = 1
        for size in shape:
            total *= size
        if total == 0 or shape[-1] % block:
            cursor.fail(f"tensor {name!r} has shape {list(shape)}, which {type_name} (blocks of {block}) cannot hold")
        return TensorInfo(name, shape, kind, offset, total // block * nbytes)

    def strings(self, key: str) -> list[str]:
        """The array of strings under `key`, built now; [] if the key is absent."""
        reference = self._array(key)
        if reference is None:
            return []
        if reference.type != _STRING:
            self._cursor.fail(f"metadata {key!r} is not an array of strings")
        strings: list[str] = []
        self._cursor.position, self._cursor.kept = reference.offset, 0
        try:
            self._cursor.walk_strings(reference.count, f"metadata {key!r}", strings)
            return strings
        except UnicodeDecodeError:
            self._cursor.fail(f"metadata {key!r} holds text that is not valid UTF-8")

    def numbers(self, key: str) -> list[int] | list[float]:
        """The array of numbers under `key`; [] if the key is absent."""
        reference = self._array(key)
        if reference is None:
            return []
        if reference.type == _STRING:
            self._cursor.fail(f"metadata {key!r} is not an array of numbers")
        if reference.count > _MAX_STRINGS:
            self._cursor.fail(f"metadata {key!r} has {reference.count} elements; at most {_MAX_STRINGS} are allowed")
        dtype = np.dtype(_SCALARS[reference.type])
        raw = read_at(self.file, self.path, reference.count * dtype.itemsize, reference.offset)
        if len(raw) != reference.count * dtype.itemsize:
            self._cursor.fail(f"the file became shorter while it was read (metadata {key!r})")
        return np.frombuffer(raw, dtype).tolist()

    def count(self, key: str) -> int:
        """Elements of the array under `key`, without reading it; 0 if the key is absent."""
        reference = self._array(key)
        return 0 if reference is None else reference.count

    def _array(self, key: str) -> ArrayRef | None:
        value = self.metadata.get(key)
        if value is None or isinstance(value, ArrayRef):
            return value
        self._cursor.fail(f"metadata {key!r} is not an array")
