"""Reading a model's file by position. A disk that fails and a file that shrinks are one line each."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cutaway.core.errors import CheckpointError


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error that names the file and the system's reason."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror or type(error).__name__}")


class ModelFile:
    """An open file of a model: path, file (the descriptor) and size. Open until `close`, or until the object goes.

    A reader derives from it and parses in `_parse`; what that raises closes the file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self.size = os.fstat(self.file).st_size
            self._parse()
        except BaseException:
            self.close()
            raise

    def _parse(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __del__(self) -> None:
        if getattr(self, "file", -1) >= 0:
            self.close()


def read_at(file: int, path: Path, count: int, offset: int) -> bytes:
    """Up to `count` bytes at `offset` of an open file; fewer at its end."""
    try:
        return os.pread(file, count, offset)
    except OSError as error:
        raise unreadable(path, error) from error


def read_into(file: int, path: Path, into: NDArray[np.uint8], offset: int, what: str) -> None:
    """Fills `into` (bytes, C-contiguous) from `offset` on; `what` names the data in the error of a file cut short."""
    view = memoryview(into.data)
    while view:
        try:
            count = os.preadv(file, [view], offset)
        except OSError as error:
            raise unreadable(path, error) from error
        if count <= 0:
            raise CheckpointError(f"{path}: the file became shorter while {what} was read")
        view, offset = view[count:], offset + count
