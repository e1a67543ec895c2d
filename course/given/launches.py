"""What a Triton kernel does while it is watched: launches and programs anywhere; in the interpreter also every address.

    with Launches() as seen:
        paged_decode(...)
    seen.grids, seen.programs, seen.read(k_cache)

A wild address ends a process where a kernel is interpreted. Here it is an error that says so, before anything is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Launches:
    """grids: of each launch, in order. Not to be entered twice at once."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self._ranges: dict[int, int] = {}  # storages of the tensors of the launch that runs: first address -> bytes
        self._read: dict[int, int] = {}
        self._undo: list[tuple[type, str, Any]] = []

    @property
    def programs(self) -> int:
        """Of the largest launch."""
        return max((prod(grid) for grid in self.grids), default=0)

    def read(self, tensor: Tensor) -> int:
        """Bytes that kernels loaded from the memory of a tensor, each as often as it was loaded. Interpreter only."""
        return self._read.get(tensor.untyped_storage().data_ptr(), 0)

    def __enter__(self) -> Launches:
        from triton.runtime import interpreter, jit

        self._replace(jit.JITFunction, "run", self._compiled)
        self._replace(interpreter.GridExecutor, "__call__", self._interpreted)
        self._replace(interpreter.InterpreterBuilder, "create_masked_load", self._load)
        self._replace(interpreter.InterpreterBuilder, "create_masked_store", self._store)
        return self

    def __exit__(self, *error: object) -> None:
        while self._undo:
            owner, name, before = self._undo.pop()
            setattr(owner, name, before)

    def _replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        self._undo.append((owner, name, before))
        setattr(owner, name, make(before))

    def _noting(self, grid: Any) -> Any:
        """A grid that is noted down when it is known."""
        if callable(grid):
            return lambda meta: self._noting(grid(meta))
        self.grids.append(tuple(int(n) for n in (grid if isinstance(grid, list | tuple) else (grid,))))
        return grid

    def _compiled(self, before: Any) -> Any:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return before(kernel, *args, grid=grid if warmup else self._noting(grid), warmup=warmup, **kwargs)

        return run

    def _interpreted(self, before: Any) -> Any:
        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            executor.grid = self._noting(executor.grid)
            storages = [t.untyped_storage() for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            self._ranges = {s.data_ptr(): s.nbytes() for s in storages}
            return before(executor, *args, **kwargs)

        return call

    def _load(self, before: Any) -> Any:
        def load(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            self._watch("loads", ptrs, mask, self._read)
            return before(builder, ptrs, mask, *rest)

        return load

    def _store(self, before: Any) -> Any:
        def store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._watch("stores", ptrs, mask, {})
            return before(builder, ptrs, value, mask, *rest)

        return store

    def _watch(self, what: str, ptrs: Any, mask: Any, count: dict[int, int]) -> None:
        at = ptrs.data[np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)].astype(np.uint64)
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        left = len(at)
        for first, length in self._ranges.items():
            inside = int(((at >= first) & (at <= first + max(length - size, 0))).sum()) if length else 0
            count[first] = count.get(first, 0) + inside * size
            left -= inside
        if left > 0:
            raise IndexError(f"a program {what} {left} of {len(at)} numbers outside of the tensors that it was given")


def read_rate(device: str = "cuda", nbytes: int = 1 << 30) -> float:
    """Bytes a second at which this card reads its memory, measured now: the best of a sum over `nbytes` and of a copy, which
    reads and writes."""
    from course.runner.timing import seconds

    numbers = torch.ones(nbytes // 2, dtype=torch.float16, device=device)
    other = torch.empty_like(numbers)
    rates: list[float] = []
    for _ in range(3):
        rates.append(nbytes / seconds(lambda: numbers.view(4096, -1).amax(1), device, 0.02))
        rates.append(2 * nbytes / seconds(lambda: other.copy_(numbers), device, 0.02))
    return max(rates)
