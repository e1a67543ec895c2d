"""Comparing two times on a machine that others use as well.

Both sides run in this process, interleaved A B B A, and each pair gives one ratio. On a CPU a side's time is the CPU time of
this process, with one thread, so that a neighbour who takes the core costs nothing; on a GPU it is wall time up to a
synchronize. The answer is the median ratio and an interval by the order of the ratios alone (a sign test): no
assumption on how noise is distributed but that pairs do not depend on each other. A verdict is looked for at three numbers of
pairs, with the error shared out among the looks, so that at most one run in twenty calls a gate wrongly that is the true ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from statistics import median

LOOKS = (1, 2, 4)  # times `rounds` ratios, at which it may be decided
TAIL = 0.025 / len(LOOKS)  # of the error that each look may make on a side: together, 2.5%
PATIENCE = 12.0  # seconds of sampling; three tries of it fit into what a check may take


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as long one side takes. low, high: the interval of the median."""

    median: float
    low: float
    high: float
    rounds: int
    first: float  # seconds, medians
    second: float

    @property
    def told(self) -> str:
        times = f"{self.first * 1e3:.2f} ms against {self.second * 1e3:.2f} ms"
        return f"{times}, {self.low:.2f} to {self.high:.2f} x over {self.rounds} pairs"


def clock(device: str) -> Callable[[], float]:
    """Seconds: of this process's CPU time, or on a GPU of wall time after all work is done."""
    if device == "cpu":
        return time.process_time
    import torch

    def synchronized() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronized


def seconds(call: Callable[[], object], device: str = "cpu", least: float = 0.002) -> float:
    """Of one call, as the mean of as many as take `least` seconds together."""
    now, count = clock(device), 1
    while True:
        began = now()
        for _ in range(count):
            call()
        taken = now() - began
        if taken >= least:
            return taken / count
        count = max(2 * count, int(1.2 * count * least / max(taken, 1e-9))) if taken > 0 else 8 * count


def interval(ratios: list[float], tail_most: float = TAIL) -> tuple[float, float]:
    """The closest pair of order statistics beyond which the median lies with at most `tail_most` a side; of few ratios, their
    range."""
    n, ordered = len(ratios), sorted(ratios)
    tail, k = 0.0, 0
    while k < n // 2 and tail + comb(n, k) / 2**n <= tail_most:
        tail += comb(n, k) / 2**n
        k += 1
    cut = max(k - 1, 0)
    return ordered[cut], ordered[n - 1 - cut]


def ratio(first: Callable[[], object], second: Callable[[], object], decided: Callable[[float, float], bool],
          device: str = "cpu", rounds: int = 8) -> Ratio:  # fmt: skip
    """first's time over second's. Looks at `rounds` ratios, at twice and at four times as many, until `decided(low, high)`; or
    until PATIENCE seconds have gone by, which leaves it undecided."""
    first()
    second()  # what only a first call pays: allocations, compilation
    ratios: list[float] = []
    firsts: list[float] = []
    seconds_: list[float] = []
    low, high = 0.0, float("inf")  # too few to say
    until = time.monotonic() + PATIENCE
    for look in LOOKS:
        while len(ratios) < look * rounds and (len(ratios) < 2 or time.monotonic() < until):
            a = seconds(first, device)
            b = seconds(second, device)
            b2 = seconds(second, device)
            a2 = seconds(first, device)
            ratios += [a / b, a2 / b2]
            firsts += [a, a2]
            seconds_ += [b, b2]
        if len(ratios) < rounds:
            break
        low, high = interval(ratios)
        if decided(low, high):
            break
    return Ratio(median(ratios), low, high, len(ratios), median(firsts), median(seconds_))
