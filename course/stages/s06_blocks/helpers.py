"""What the checks of stage 06 share: small pools, tables that grow as the engine's do, and refusals that are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from course.runner.checking import Lab

SIZE = 16


def many(n: int, what: str) -> str:
    """1 block, 2 blocks."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def few(told: Sequence[str], most: int = 2) -> str:
    """The first ones, and how many more there are."""
    more = [f"and {len(told) - most} more"] if len(told) > most else []
    return "; ".join([*told[:most], *more])


def pool_of(lab: Lab, blocks: int, size: int = SIZE) -> Any:
    """An allocator with so many blocks to hand out, beside the dummy."""
    return lab.app.BlockAllocator(blocks + 1, size)


def drain(lab: Lab, pool: Any, most: int = 10_000) -> list[int]:
    """All that can still be had, one block at a time."""
    ids: list[int] = []
    for _ in range(most):
        try:
            ids += pool.allocate(1)
        except lab.app.OutOfBlocks:
            return ids
    lab.expect(
        False, "a pool without a free block has to raise OutOfBlocks", f"asked {most:,} times, it gave {len(ids):,} blocks"
    )
    return ids


def grow(lab: Lab, pool: Any, table: Any, tokens: int, size: int = SIZE) -> None:
    """The blocks that so many tokens need, those counted that the table has."""
    table.extend(pool.allocate(table.missing(tokens)))
    lab.expect(len(table.blocks) * size >= tokens, "the table is too short for its tokens: missing() rounds down",
               f"{many(tokens, 'token')}, {many(len(table.blocks), 'block')} of {size}")  # fmt: skip


def clear(lab: Lab) -> None:
    """What the engine does to the table of a request that has to give way: it empties the list, and begins again."""
    table = lab.app.BlockTable(SIZE)
    grow(lab, pool_of(lab, 8), table, SIZE + 1)
    table.blocks.clear()
    lab.equal(table.missing(SIZE + 1), 2, f"missing({SIZE + 1}) after table.blocks.clear()",
              "the engine clears table.blocks; a count kept beside it is then wrong")  # fmt: skip


def refusals(lab: Lab, cases: list[tuple[str, int, Callable[[], object]]]) -> tuple[int, str]:
    """How many of (what, block, call) raise a ValueError that names the block; and what the others did."""
    good, others = 0, []
    for what, block, call in cases:
        try:
            others.append(f"{what}: answered {call()!r}")
        except NotImplementedError:
            raise
        except Exception as error:
            if isinstance(error, ValueError) and str(block) in str(error):
                good += 1
            else:
                others.append(f"{what}: {type(error).__name__}({error}), not a ValueError that names block {block}")
    return good, few(others)
