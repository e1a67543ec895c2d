"""Stage 06: the allocator and the block table."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cutaway.core.blocks import BlockAllocator, BlockTable, OutOfBlocks


def test_the_dummy_block_is_never_handed_out() -> None:
    allocator = BlockAllocator(5)
    assert allocator.num_free == 4
    assert allocator.allocate(4) == [1, 2, 3, 4]
    assert allocator.num_free == 0


def test_allocation_is_all_or_nothing() -> None:
    allocator = BlockAllocator(5)
    allocator.allocate(2)
    with pytest.raises(OutOfBlocks, match="3 blocks asked for, 2 of 4 are free"):
        allocator.allocate(3)
    assert allocator.num_free == 2
    assert allocator.allocate(0) == []
    with pytest.raises(ValueError, match="-1"):
        allocator.allocate(-1)


def test_the_lowest_ids_come_first() -> None:
    allocator = BlockAllocator(9)
    allocator.allocate(8)
    allocator.free([7, 2, 5, 3])
    assert allocator.allocate(3) == [2, 3, 5]


@pytest.mark.parametrize("block", [0, 9, -1, 100])
def test_a_foreign_block_is_refused_by_name(block: int) -> None:
    allocator = BlockAllocator(9)
    with pytest.raises(ValueError, match=f"block {block} is not of this pool"):
        allocator.free([block])


def test_a_double_free_is_refused_by_name() -> None:
    allocator = BlockAllocator(9)
    ids = allocator.allocate(3)
    allocator.free(ids)
    with pytest.raises(ValueError, match="block 2 is free already"):
        allocator.free([2])
    with pytest.raises(ValueError, match="block 8 is free already"):
        allocator.free([8])  # never handed out
    one = allocator.allocate(1)
    with pytest.raises(ValueError, match="block 1 is free already"):
        allocator.free([*one, *one])
    assert allocator.num_free == 8
    allocator.check()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (0, 16), (4, 0)])
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        BlockAllocator(num_blocks, block_size)


def test_random_use_never_hands_a_block_out_twice() -> None:
    rng = random.Random(1)
    allocator, held = BlockAllocator(20), []
    for _ in range(2000):
        if rng.random() < 0.5 and allocator.num_free:
            held += allocator.allocate(rng.randint(1, allocator.num_free))
            assert len(set(held)) == len(held)
        elif held:
            rng.shuffle(held)
            n = rng.randint(1, len(held))
            allocator.free(held[:n])
            held = held[n:]
        assert allocator.num_free == 19 - len(held)
        allocator.check()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_missing_blocks(tokens: int, blocks: int) -> None:
    table = BlockTable(16)
    assert table.missing(tokens) == blocks
    table.extend([4])
    assert table.missing(tokens) == max(0, blocks - 1)


def test_slots_follow_the_table() -> None:
    table = BlockTable(4)
    table.extend([7, 2])
    table.extend([5])
    assert [table.slot(p) for p in (0, 3, 4, 11)] == [28, 31, 8, 23]
    slots = table.slots(3, 9)
    assert slots.dtype == np.int32
    assert slots.tolist() == [table.slot(p) for p in range(3, 9)]
    assert table.slots(0, 12).tolist() == [table.slot(p) for p in range(12)]
    assert table.slots(8, 12).tolist() == [20, 21, 22, 23]
    assert table.slots(5, 5).tolist() == [] and table.slots(12, 12).tolist() == []


def test_positions_outside_the_table_raise() -> None:
    table = BlockTable(4)
    table.extend([7, 2])
    for position in (-1, 8):
        with pytest.raises(IndexError, match=f"position {position} is outside the table's 8"):
            table.slot(position)
    for start, stop in ((0, 9), (-1, 3), (5, 4)):
        with pytest.raises(IndexError):
            table.slots(start, stop)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_a_sequence_wastes_less_than_one_block(length: int) -> None:
    assert 0 <= BlockTable(16).missing(length) * 16 - length < 16
