"""Blocks of the KV pool, and the table that maps a sequence's positions to them (stage 06).

The pool is cut into blocks of `block_size` tokens, as an operating system cuts memory into pages: a sequence wastes less
than one block, whatever its length (PagedAttention, Kwon et al. 2023). This file knows ids and a free list; who shares a
block, and what is worth keeping, is `prefix_cache.py`'s.

Invariants: block 0, the dummy, is never handed out; an id is free or handed out, never both; `allocate` gives all that was
asked or nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was handed out."""


class BlockAllocator:
    """Hands out block ids 1 to num_blocks - 1, the lowest free ones first, so that a fresh table lies together in memory.

    num_blocks   blocks of the pool, the dummy included; at least 2
    block_size   tokens a block
    """

    def __init__(self, num_blocks: int, block_size: int = 16):
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a pool needs 2 blocks of 1 token or more, got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._heap = list(range(1, num_blocks))  # a sorted list is a heap
        self._free = bytearray(b"\x01" * num_blocks)  # by id: whether it lies in the heap
        self._free[0] = 0

    @property
    def num_free(self) -> int:
        return len(self._heap)

    def allocate(self, n: int = 1) -> list[int]:
        """`n` blocks, ascending. Raises OutOfBlocks, and hands out nothing, where fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > len(self._heap):
            raise OutOfBlocks(f"{n} blocks asked for, {len(self._heap)} of {self.num_blocks - 1} are free")
        ids = [heapq.heappop(self._heap) for _ in range(n)]
        for block in ids:
            self._free[block] = 0
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Takes blocks back. Raises ValueError naming the first that is foreign or free already; those before it are freed."""
        for block in ids:
            if not 0 < block < self.num_blocks:
                raise ValueError(f"block {block} is not of this pool: its blocks are 1 to {self.num_blocks - 1}")
            if self._free[block]:
                raise ValueError(f"block {block} is free already")
            self._free[block] = 1
            heapq.heappush(self._heap, block)

    def check(self) -> None:
        """Asserts the invariants of this file."""
        assert sorted(self._heap) == [i for i, free in enumerate(self._free) if free], "free list and flags differ"
        assert not self._free[0], "the dummy block is in the free list"


class BlockTable:
    """One sequence's page table: block i holds positions i * block_size to (i + 1) * block_size - 1."""

    def __init__(self, block_size: int = 16):
        self.block_size = block_size
        self.blocks: list[int] = []

    def missing(self, num_tokens: int) -> int:
        """Blocks to add so that `num_tokens` fit."""
        return max(0, -(-num_tokens // self.block_size) - len(self.blocks))

    def extend(self, ids: list[int]) -> None:
        self.blocks.extend(ids)

    def slot(self, position: int) -> int:
        """Where a position lies in the pool: block * block_size + offset. IndexError past the end of the table."""
        if not 0 <= position < len(self.blocks) * self.block_size:
            raise IndexError(f"position {position} is outside the table's {len(self.blocks) * self.block_size} positions")
        return self.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def slots(self, start: int, stop: int) -> NDArray[np.int32]:
        """`slot` of positions start to stop - 1: int32 [stop - start]."""
        if not 0 <= start <= stop <= len(self.blocks) * self.block_size:
            raise IndexError(f"positions {start} to {stop} are outside the table's {len(self.blocks) * self.block_size}")
        positions = np.arange(start, stop, dtype=np.int32)
        first = start // self.block_size
        blocks = np.asarray(self.blocks[first : -(-stop // self.block_size)], dtype=np.int32)
        return blocks[positions // self.block_size - first] * self.block_size + positions % self.block_size
