"""What is wrong with a `split`, by its name: small questions, the simplest mistakes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Split = Callable[[Sequence[int], int, int], list[int]]


@dataclass(frozen=True)
class Probe:
    """A question, its right answer, and what wrong answers to it mean: the first that holds."""

    pending: tuple[int, ...]
    budget: int
    chunk: int
    right: list[int]
    meaning: tuple[tuple[Callable[[list[int]], bool], str], ...]


NEGATIVE = (lambda got: min(got) < 0, "a grant is negative: once the budget is used up, a row gets 0")
PAST = (lambda got: sum(got) > 2, "decodes are served past the budget, which may be less than their number")
PROBES = (
    Probe((3,), 10, 8, [3], (
        (lambda got: got[0] > 3, "a row gets a whole chunk where it has less pending: take the least of the three"),
    )),
    Probe((0,), 5, 5, [0], (
        NEGATIVE,
        (lambda got: got[0] > 0, "a row with 0 pending gets tokens: its newest one is in flight, there is nothing to compute"),
    )),
    Probe((100,), 50, 100, [50], (
        (lambda got: got[0] == 0, "a prompt goes through whole or not at all: it takes what there is, and the rest later"),
        (lambda got: 0 < got[0] < 50, "a slice may have any size, and this one is rounded: the last tokens never go through"),
        (lambda got: got[0] > 50, "a slice has a size of its own: it is the budget that bounds a step"),
    )),
    Probe((40, 1), 20, 100, [19, 1], (
        NEGATIVE,
        (lambda got: got == [1, 19], "the grants stand in the order of granting: a row keeps its place in the list"),
        (lambda got: got == [0, 1], "a prompt waits until no row decodes: its slices ride along in the same step"),
        (lambda got: sum(got) > 20, "the slices are cut from the whole budget, not from what the decodes have left of it"),
        (lambda got: got[1] == 0, "a prompt before a decode takes its token: decodes are served first, wherever they stand"),
        (lambda got: got[0] == 10, "every row gets an equal part: what a decode does not need is lost"),
        (lambda got: got[0] < 19, "budget is left over while a prompt waits: its slice is smaller than what is left"),
    )),
    Probe((1, 1, 1, 1), 2, 4, [1, 1, 0, 0], (NEGATIVE, PAST)),
    Probe((1, 0), 0, 4, [0, 0], (
        NEGATIVE,
        (lambda got: sum(got) > 0, "decodes are served past the budget: nothing is left of 0 tokens"),
    )),
    Probe((5,), 0, 4, [0], (NEGATIVE, (lambda got: got[0] > 0, "a prompt is served past the budget: it may be 0"))),
    Probe((9,), 20, 4, [4], ((lambda got: got[0] > 4, "the chunk is forgotten: no row gets more of a step than `chunk`"),)),
    Probe((30, 30), 40, 100, [30, 10], (
        (lambda got: got == [10, 30], "the last prompt is served first: the earliest one is to end early"),
        (lambda got: got[1] == 0, "one prompt a step: what the first leaves of the budget goes to the next"),
        (lambda got: sum(got) > 40, "the budget counts tokens, not rows: what a row gets is taken off it"),
        (lambda got: got[0] < 30, "every prompt gets an equal part: they all end late then, and none early"),
    )),
)  # fmt: skip


def mistake(split: Split) -> str:
    """The first mistake that a question brings to light, with the question; "" where none does."""
    for probe in PROBES:
        got = list(split(list(probe.pending), probe.budget, probe.chunk))
        if got == probe.right or len(got) != len(probe.right):
            continue
        for holds, text in probe.meaning:
            if holds(got):
                return f"{text} (split({list(probe.pending)}, {probe.budget}, {probe.chunk}) is {probe.right}, yours {got})"
    return ""
