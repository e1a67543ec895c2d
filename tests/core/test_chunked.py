"""Stage 11: how a budget is shared out."""

from __future__ import annotations

import random

import pytest

from cutaway.core.chunked import split
from cutaway.core.scheduler import whole_or_nothing


@pytest.mark.parametrize(
    ("pending", "budget", "chunk", "granted"),
    [
        ([], 10, 4, []),
        ([1, 1, 1], 10, 4, [1, 1, 1]),
        ([1, 1, 1], 2, 4, [1, 1, 0]),
        ([100, 1, 1], 10, 100, [8, 1, 1]),  # decodes first, though the prompt was admitted first
        ([100, 1, 50], 20, 12, [12, 1, 7]),
        ([100], 64, 512, [64]),
        ([100], 512, 64, [64]),
        ([2, 0, 1], 10, 4, [2, 0, 1]),
        ([5, 1], 1, 4, [0, 1]),
        ([7, 1], 0, 4, [0, 0]),
    ],
)
def test_split(pending: list[int], budget: int, chunk: int, granted: list[int]) -> None:
    assert split(pending, budget, chunk) == granted


def test_split_never_exceeds_anything_and_wastes_nothing() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        pending = [rng.choice([0, 1, 1, rng.randint(1, 300)]) for _ in range(rng.randint(0, 12))]
        budget, chunk = rng.randint(0, 200), rng.randint(1, 200)
        granted = split(pending, budget, chunk)
        most = [min(p, chunk) for p in pending]
        assert all(0 <= g <= m for g, m in zip(granted, most, strict=True))
        assert sum(granted) == min(budget, sum(most))
        starved = any(p == 1 and not g for p, g in zip(pending, granted, strict=True))
        assert not starved or not any(g for p, g in zip(pending, granted, strict=True) if p > 1)


@pytest.mark.parametrize(
    ("pending", "budget", "granted"),
    [([3, 4, 5], 12, [3, 4, 5]), ([3, 4, 5], 11, [3, 4, 0]), ([20, 4], 10, [0, 4]), ([], 5, []), ([0, 1], 1, [0, 1])],
)
def test_whole_or_nothing(pending: list[int], budget: int, granted: list[int]) -> None:
    assert whole_or_nothing(pending, budget, 1) == granted
