"""Exact figures of a trace written by hand. Times are multiples of 1/8 s, which floats hold exactly."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from cutaway.core.metrics import SECONDS, Histogram, Metrics, percentile, poisson


@pytest.fixture
def trace():
    """Request 1: queue 0.5, TTFT 1, gaps 0.25 0.25 0.5. Request 2: queue 1, TTFT 2, two at once, then two at once.
    Request 3: aborted while it waits. Request 4: still running."""
    m = Metrics()
    m.arrived(1, 0.0, 100)
    m.arrived(2, 0.5, 32)
    m.scheduled(1, 0.5, 0)
    m.step(1.0, used=8, total=32, rows=1, preempted=0)
    m.tokens(1, 1.0, 1)
    m.arrived(3, 1.0, 7)
    m.tokens(1, 1.25, 1)
    m.scheduled(2, 1.5, 16)
    m.step(1.5, used=16, total=32, rows=2, preempted=1)
    m.tokens(1, 1.5, 1)
    m.tokens(1, 2.0, 1)
    m.finished(1, 2.0, "stop")
    m.step(2.5, used=4, total=32, rows=2, preempted=2)
    m.tokens(2, 2.5, 2)
    m.finished(3, 2.5, "abort")
    m.tokens(2, 3.5, 2)
    m.finished(2, 4.0, "length")
    m.arrived(4, 4.0, 1)
    m.scheduled(4, 4.0, 0)
    m.arrived(5, 4.0, 1)
    return m


def test_counters_and_gauges(trace):
    shot = trace.snapshot()
    assert shot["counters"] == {
        "prompt_tokens": 133,  # 1, 2 and 4; request 3 was never worked on
        "generation_tokens": 8,
        "num_preemptions": 3,
        "prefix_cache_queries": 133,
        "prefix_cache_hits": 16,
        "steps": 3,
    }
    assert shot["finished"] == {"stop": 1, "length": 1, "abort": 1}
    assert shot["gauges"] == {
        "num_requests_waiting": 1,
        "num_requests_running": 1,
        "kv_cache_usage_perc": 0.125,
        "kv_cache_usage_peak": 0.5,
        "kv_cache_usage_mean": pytest.approx((0.25 + 0.5 + 0.125) / 3),
    }


def test_each_request_s_own_times(trace):
    one, three, two = trace.recent
    assert (one.id, one.queue, one.ttft, one.itl, one.e2e, one.num_tokens) == (1, 0.5, 1.0, 1 / 3, 2.0, 4)
    assert (two.id, two.queue, two.ttft, two.itl, two.e2e, two.num_tokens) == (2, 1.0, 2.0, 1 / 3, 3.5, 4)
    assert (three.id, three.queue, three.ttft, three.itl, three.e2e, three.reason) == (3, None, None, 0.0, 1.5, "abort")


def test_histograms(trace):
    h = trace.snapshot()["histograms"]
    assert {name: (x["count"], x["sum"]) for name, x in h.items()} == {
        "time_to_first_token_seconds": (2, 3.0),
        "inter_token_latency_seconds": (6, 2.0),  # 0.25 0.25 0.5 | 0 1 0: n tokens have n - 1 gaps
        "e2e_request_latency_seconds": (2, 5.5),
        "request_queue_time_seconds": (3, 1.5),
        "step_seconds": (2, 1.5),
        "step_rows": (3, 5.0),
    }
    itl = dict(h["inter_token_latency_seconds"]["buckets"])
    assert (itl[0.001], itl[0.15], itl[0.25], itl[0.5], itl[0.75], itl[1.0], itl[math.inf]) == (2, 2, 4, 5, 5, 6, 6)


def test_recent_percentiles_and_rate(trace):
    recent = trace.snapshot()["recent"]
    assert (recent["requests"], recent["output_tokens"], recent["seconds"], recent["tokens_per_second"]) == (3, 8, 4.0, 2.0)
    assert recent["ttft"] == {"mean": 1.5, "p50": 1.5, "p90": pytest.approx(1.9), "p99": pytest.approx(1.99)}
    assert recent["queue"]["mean"] == 0.75
    assert recent["e2e"]["mean"] == 2.75
    assert recent["itl"]["p50"] == 0.25 and recent["itl"]["mean"] == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("ttft", "itl", "expected"),
    [(2.0, 1.0, 0.5), (1.0, 1.0, 0.25), (1.99, 0.34, 0.25), (2.0, 0.33, 0.0), (0.99, 9.0, 0.0), (math.inf, math.inf, 0.5)],
)
def test_goodput_needs_both_limits_and_an_end(trace, ttft, itl, expected):
    assert trace.goodput(ttft, itl) == expected


def test_an_answer_of_one_token_has_no_gap_to_fail_by():
    m = Metrics()
    m.arrived(1, 0.0, 4)
    m.tokens(1, 1.0, 1)
    m.finished(1, 2.0, "stop")
    assert m.goodput(1.0, 0.0) == 0.5


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_was_cut_off_is_no_goodput(reason):
    m = Metrics()
    m.arrived(1, 0.0, 4)
    m.scheduled(1, 0.0, 0)
    m.tokens(1, 1.0, 1)
    m.finished(1, 2.0, reason)
    assert m.goodput(9.0, 9.0) == 0.0
    shot = m.snapshot()
    assert shot["histograms"]["e2e_request_latency_seconds"]["count"] == 0 and math.isnan(shot["recent"]["e2e"]["mean"])
    assert shot["histograms"]["time_to_first_token_seconds"]["count"] == 1
    assert shot["finished"] == {reason: 1}


def test_only_the_first_schedule_counts():
    m = Metrics()
    m.arrived(1, 0.0, 64)
    m.scheduled(1, 1.0, 16)
    m.scheduled(1, 5.0, 64)  # resumed after preemption: its own blocks are no hit of the prompt
    m.finished(1, 6.0, "stop")
    shot = m.snapshot()
    assert shot["counters"]["prefix_cache_hits"] == 16
    assert shot["histograms"]["request_queue_time_seconds"]["sum"] == 1.0
    assert m.recent[0].queue == 1.0


def test_events_after_the_end_are_dropped():
    m = Metrics()
    m.arrived(1, 0.0, 4)
    m.scheduled(1, 0.0, 0)
    m.finished(1, 1.0, "abort")
    before = m.snapshot()
    m.tokens(1, 2.0, 1)
    m.scheduled(1, 2.0, 3)
    m.finished(1, 2.0, "stop")
    after = m.snapshot()
    for key in ("counters", "finished", "gauges", "histograms"):
        assert before[key] == after[key]
    assert after["gauges"]["num_requests_running"] == after["gauges"]["num_requests_waiting"] == 0


def test_an_id_may_come_again_only_after_its_end():
    m = Metrics()
    m.arrived(1, 0.0, 4)
    with pytest.raises(ValueError, match="request 1"):
        m.arrived(1, 1.0, 4)
    m.finished(1, 2.0, "stop")
    m.arrived(1, 3.0, 4)


@pytest.mark.parametrize("finished_first", [False, True])
def test_idle_time_is_no_step_time(finished_first):
    m = Metrics()
    for start in (0.0, 1000.0):
        m.arrived(1, start, 1)
        m.scheduled(1, start, 0)
        m.step(start + 0.125, 1, 2, 1, 0)
        if finished_first:
            m.finished(1, start + 0.25, "stop")
        m.step(start + 0.25, 1, 2, 1, 0)
        m.finished(1, start + 0.25, "stop")
    m.step(2000.0, 1, 2, 1, 0, seconds=0.5)  # measured by who knows better
    steps = m.snapshot()["histograms"]["step_seconds"]
    assert (steps["count"], steps["sum"]) == (3, 0.75)


def test_an_empty_snapshot_has_every_name():
    shot = Metrics().snapshot()
    assert shot["recent"]["requests"] == 0 and math.isnan(shot["recent"]["ttft"]["p99"])
    assert shot["gauges"]["kv_cache_usage_mean"] == 0.0
    assert all(h["count"] == 0 and h["buckets"][-1] == (math.inf, 0) for h in shot["histograms"].values())
    assert Metrics().goodput(1, 1) == 0.0
    Metrics().step(0.0, 0, 0, 0, 0)


def test_memory_does_not_grow_with_what_was_served():
    m = Metrics(keep=50)

    def size():
        seen, stack, total = set(), [m], 0
        while stack:
            x = stack.pop()
            if id(x) in seen:
                continue
            seen.add(id(x))
            total += sys.getsizeof(x)
            if isinstance(x, dict):
                stack += [*x.keys(), *x.values()]
            elif isinstance(x, (list, tuple)) or type(x).__name__ == "deque":
                stack += list(x)
            else:
                stack += [getattr(x, "__dict__", None)]
        return total

    def serve(n):
        for i in range(n):
            m.arrived(i, float(i), 10)
            m.scheduled(i, i + 0.25, 0)
            for j in range(5):
                m.tokens(i, i + 0.5 + j / 64, 1)
            m.step(float(i), 1, 2, 1, 0)
            m.finished(i, i + 1.0, "stop")

    serve(300)
    before = size()
    serve(3000)
    assert size() <= before * 1.02
    shot = m.snapshot()
    assert shot["finished"]["stop"] == 3300
    assert shot["recent"]["requests"] == 50
    assert shot["histograms"]["time_to_first_token_seconds"]["count"] == 3300


def test_a_value_on_a_bound_belongs_to_it():
    h = Histogram([1.0, 2.0])
    for value in (0.0, 1.0, 1.5, 2.0, 2.5):
        h.add(value)
    assert h.snapshot() == {"buckets": [(1.0, 2), (2.0, 4), (math.inf, 5)], "sum": 7.0, "count": 5}
    assert list(SECONDS) == sorted(set(SECONDS))


@pytest.mark.parametrize(("q", "expected"), [(0, 1.0), (25, 1.75), (50, 2.5), (100, 4.0)])
def test_percentile(q, expected):
    assert percentile([4.0, 1.0, 3.0, 2.0], q) == expected


def test_percentile_of_nothing_and_out_of_range():
    assert math.isnan(percentile([], 50))
    assert percentile([7.0], 99) == 7.0
    for q in (-1, 100.5):
        with pytest.raises(ValueError, match="0 to 100"):
            percentile([1.0], q)


def test_poisson_arrivals():
    times = poisson(10.0, 20_000, seed=3)
    gaps = np.diff([0.0, *times])
    assert len(times) == 20_000 and (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.1, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # exponential: as spread as it is long
    assert gaps.max() > 5 * gaps.mean()
    assert times == poisson(10.0, 20_000, seed=3) != poisson(10.0, 20_000, seed=4)
    assert poisson(math.inf, 3, 0) == [0.0, 0.0, 0.0]
    assert poisson(1.0, 0, 0) == []
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="over 0"):
            poisson(rate, 1, 0)
