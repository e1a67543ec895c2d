"""Stage 06: blocks, block tables, the free list. Virtual memory for the KV cache.

The KV pool is one array, cut into blocks of `block_size` tokens. A sequence holds a list of block ids, its *block table*, and
takes another block only when it crosses into it. Which ids they are does not matter: the table says where each position lies.

    block_size 4, blocks [7, 2]     position   0   1   2   3 | 4  5  6  7
                                    slot      28  29  30  31 | 8  9 10 11      slot = block * block_size + offset in the block

You write the allocator, which knows ids and a free list and nothing of sequences, and the table, which knows one sequence and
nothing of the pool. There are no tensors here. Your file then replaces the engine's own: it makes one `BlockAllocator` for the
pool and one `BlockTable(block_size)` a request, reads and empties `table.blocks`, and speaks to both by the methods below.
It may import the standard library and NumPy.

Traps by name:
  - *one too many*   `tokens // block_size + 1` is right for 17 tokens and wrong for 16: every such sequence holds a block in
                     which nothing is ever written, and every answer is still right.
  - *half a meal*    an allocation that takes blocks one by one and fails at the third has lost two.
  - *freed twice*    an id that is in the free list twice goes to two sequences. Nothing fails then: one reads what the other
                     wrote, and goes on in fluent text.
  - *the dummy*      rows that only fill up a batch write into block 0. If a sequence owns block 0, they write into its past.
  - *from behind*    Python reads `blocks[-1]` without complaint, so a position of -1 has a slot. It must not.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was handed out. Its message has both figures."""


class BlockAllocator:
    """Hands out block ids and takes them back.

    num_blocks   blocks of the pool, *the dummy included*: `BlockAllocator(9)` has the blocks 1 to 8 to give. 2 or more.
    block_size   tokens a block, 1 or more

    >>> pool = BlockAllocator(9)
    >>> pool.allocate(3), pool.num_free
    ([1, 2, 3], 5)
    >>> pool.free([2]); pool.allocate(2)
    [2, 4]
    """

    def __init__(self, num_blocks: int, block_size: int = 16):
        raise NotImplementedError

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now. Asked several times a step: keep it cheap. (An attribute will do, too.)"""
        raise NotImplementedError

    def allocate(self, n: int = 1) -> list[int]:
        """`n` different block ids: the lowest free ones, ascending, so that blocks taken together lie together in memory where
        that is possible. 0 gives []. A pool has tens of thousands of blocks, and this runs every step: sorting all of them
        each time is too slow; the standard library has a structure whose smallest element comes out first. (The checks
        time `allocate`, `num_free` and `free` together, in a pool of 64 blocks and in one of 8,192.)

        Raises OutOfBlocks where fewer than `n` are free, and then hands out nothing: num_free is what it was, and the same
        blocks can still be had.
        """
        raise NotImplementedError

    def free(self, ids: Iterable[int]) -> None:
        """Takes blocks back, in any order; `ids` may be an iterator, which can be read once only. Its time does not grow with
        the pool either: `block in some_list` looks at every element.

        Raises ValueError that names the block where it is
          - free already: freed before, never handed out, or a second time in `ids`;
          - not of this pool: block 0, a negative id, or num_blocks and above.
        What became of the other blocks in `ids` is then up to you; a block is never in the free list twice, nor ever lost.
        """
        raise NotImplementedError


class BlockTable:
    """One sequence's page table: `blocks[i]` holds positions i * block_size to (i + 1) * block_size - 1.

    blocks   list[int], empty at first. The engine reads it, replaces single entries, and clears it when the sequence ends, so
             compute everything from it, and keep neither count nor copy beside it.

    >>> table = BlockTable(4)
    >>> table.missing(4), table.missing(5)
    (1, 2)
    >>> table.extend([7, 2]); table.missing(5), table.slot(5), table.slots(3, 6)
    (0, 9, array([31,  8,  9], dtype=int32))
    """

    blocks: list[int]

    def __init__(self, block_size: int = 16):
        raise NotImplementedError

    def missing(self, num_tokens: int) -> int:
        """How many blocks to add so that `num_tokens` tokens fit, those included that are in the table already. Never
        negative; changes nothing."""
        raise NotImplementedError

    def extend(self, ids: list[int]) -> None:
        """Adds blocks at the end, in the order given."""
        raise NotImplementedError

    def slot(self, position: int) -> int:
        """Where a position lies in the pool: block * block_size + offset within the block, as a plain int, none of NumPy's.

        Raises IndexError for a negative position, and for one past the end of the last block.
        """
        raise NotImplementedError

    def slots(self, start: int, stop: int) -> NDArray[np.int32]:
        """The slots of positions start, start + 1, ... stop - 1: int32 [stop - start], empty (but int32) where they are equal.

        A range may begin and end inside blocks. Raises IndexError unless 0 <= start <= stop <= all positions of the table:
        `stop` may be the end itself, as in a slice.
        """
        raise NotImplementedError
