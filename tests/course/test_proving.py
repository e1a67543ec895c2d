"""What counts as proved, and what a busy machine may say."""

from __future__ import annotations

import itertools

import pytest
from course.runner import timing
from course.runner.declaration import stage
from course.runner.faults import Fault
from course.runner.proving import Proof, _judge_fault


def judged(caught_by: tuple[str, ...], caught: list[str], not_measured: set[str], full: bool) -> tuple[int, int, int]:
    """(passed, skipped, complaints)"""
    proof = Proof(stage("06"), caught={"f": caught})
    _judge_fault(proof, Fault("06", "f", caught_by, ()), {"a", "b", "c"}, not_measured, full)
    return proof.passed, proof.skipped, len(proof.complaints)


@pytest.mark.parametrize("full", [False, True])
def test_a_fault_that_nothing_caught_is_not_proved(full: bool) -> None:
    assert judged(("a",), ["a"], set(), full) == (1, 0, 0)
    assert judged(("a",), [], set(), full) == (0, 0, 1)
    assert judged(("a",), [], {"a"}, full) == (0, 1, 0), "neither caught nor missed"
    assert judged((), [], set(), full) == (0, 0, 1), "it names no check"


def test_the_whole_list_must_be_exact() -> None:
    assert judged(("a", "b"), ["a"], set(), True) == (0, 0, 1)
    assert judged(("a",), ["a", "c"], set(), True) == (0, 0, 1)
    assert judged(("a", "b"), ["a"], {"b"}, True) == (1, 0, 0)
    assert judged(("a", "b"), [], {"b"}, True) == (0, 0, 1), "a was measured, and missed it"


def test_an_interval_needs_more_than_a_few_ratios() -> None:
    assert timing.interval([1.0, 2.0, 3.0]) == (1.0, 3.0)
    low, high = timing.interval([float(n) for n in range(32)])
    assert 0 < low < 15.5 < high < 31


def test_sampling_ends_undecided_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(0, 5.0)
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(timing, "seconds", lambda *_: 1.0)
    found = timing.ratio(lambda: None, lambda: None, lambda low, high: (low > 1.0) == (high > 1.0))
    assert found.rounds < 8 and (found.low, found.high) == (0.0, float("inf"))
