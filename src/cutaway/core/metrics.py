"""What a serving engine is judged by: waiting, time to first token, gaps between tokens, memory in use (stage 16).

Times are seconds of one monotonic clock, given by the caller; nothing here reads a clock, so a trace written by hand gives
exact figures. A server runs for weeks: counters and histograms have a fixed size, and percentiles are of the last `keep`
requests and the last `keep` gaps.

Definitions, as a client would measure them:
queue wait   arrival to the first step that works on the request; being preempted later does not count again
TTFT         arrival to the first token, queue wait included
ITL          the gap before each further token. Tokens that come at once are one wait and then gaps of 0: a reader sees a
             stall and a burst, and a mean over the burst would hide it. n tokens have n - 1 gaps
E2E          arrival to the end, of requests that were not cut off
goodput      requests a second that ended well within both limits (DistServe, Zhong et al. 2024)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SUPPORTS = frozenset({"step_seconds"})  # `step` takes the step's own time

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25,
           0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)  # fmt: skip
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
FAILED = frozenset({"abort", "error"})  # cut off: no latency of theirs is an answer's, and none is goodput


class Histogram:
    """Counts of values at or under each bound, as Prometheus has it: fixed bounds, so two of them can be added."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def snapshot(self) -> dict[str, Any]:
        total = np.cumsum(self.counts).tolist()
        return {"buckets": list(zip((*self.bounds, math.inf), total, strict=True)), "sum": self.sum, "count": total[-1]}


@dataclass(slots=True)
class _Live:
    """A request that has not ended: a few numbers, however long its answer gets."""

    arrival: float
    prompt_tokens: int
    scheduled: float | None = None
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A request that has ended. `queue` and `ttft` are None where it never got that far; `itl` is the mean of its gaps, 0
    where there are none."""

    id: int
    arrival: float
    end: float
    reason: str
    prompt_tokens: int
    num_tokens: int
    queue: float | None
    ttft: float | None
    itl: float

    @property
    def e2e(self) -> float:
        return self.end - self.arrival


class Metrics:
    """Fed by events, asked by `snapshot` and `goodput`.

    An event of an id that is not live is dropped: results of an aborted request may still be on their way. The exception is
    an id that arrives twice while live, which raises ValueError. `keep` bounds the memory.
    """

    def __init__(self, keep: int = 4096) -> None:
        self.recent: deque[Record] = deque(maxlen=keep)
        self._gaps: deque[float] = deque(maxlen=keep)
        self._live: dict[int, _Live] = {}
        self._running = 0
        self._reasons: Counter[str] = Counter()
        self._counters = dict.fromkeys(
            ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "steps"), 0
        )
        self._usage = self._usage_peak = self._usage_sum = 0.0
        self._last_step: float | None = None
        self._histograms = {
            "time_to_first_token_seconds": Histogram(SECONDS),
            "inter_token_latency_seconds": Histogram(SECONDS),
            "e2e_request_latency_seconds": Histogram(SECONDS),
            "request_queue_time_seconds": Histogram(SECONDS),
            "step_seconds": Histogram(SECONDS),
            "step_rows": Histogram(ROWS),
        }

    def arrived(self, id: int, t: float, prompt_tokens: int) -> None:
        """The request was accepted; it waits."""
        if id in self._live:
            raise ValueError(f"request {id} arrived twice")
        self._live[id] = _Live(t, prompt_tokens)

    def scheduled(self, id: int, t: float, cached_tokens: int) -> None:
        """A step begins to work on it, with `cached_tokens` of its prompt from the prefix cache. Only the first time counts."""
        live = self._live.get(id)
        if live is None or live.scheduled is not None:
            return
        live.scheduled = t
        if not self._running:
            self._last_step = None  # nothing ran until now: the time since the last step was idle
        self._running += 1
        self._counters["prompt_tokens"] += live.prompt_tokens
        self._counters["prefix_cache_queries"] += live.prompt_tokens
        self._counters["prefix_cache_hits"] += cached_tokens
        self._histograms["request_queue_time_seconds"].add(t - live.arrival)

    def tokens(self, id: int, t: float, n: int) -> None:
        """n new tokens of its answer came at t."""
        live = self._live.get(id)
        if live is None or n == 0:
            return
        at_once = n - 1
        if live.first is None:
            live.first = t
            self._histograms["time_to_first_token_seconds"].add(t - live.arrival)
        else:
            self._gap(t - live.last, 1)
        if at_once:
            self._gap(0.0, at_once)
        live.last = t
        live.num_tokens += n
        self._counters["generation_tokens"] += n

    def _gap(self, seconds: float, times: int) -> None:
        self._histograms["inter_token_latency_seconds"].add(seconds, times)
        self._gaps.extend([seconds] * times)

    def finished(self, id: int, t: float, reason: str) -> None:
        """It ended: "stop", "length", "abort" or "error"."""
        live = self._live.pop(id, None)
        if live is None:
            return
        self._running -= live.scheduled is not None
        self._reasons[reason] += 1
        if reason not in FAILED:
            self._histograms["e2e_request_latency_seconds"].add(t - live.arrival)
        queue = None if live.scheduled is None else live.scheduled - live.arrival
        ttft = None if live.first is None else live.first - live.arrival
        itl = 0.0 if live.first is None or live.num_tokens < 2 else (live.last - live.first) / (live.num_tokens - 1)
        self.recent.append(Record(id, live.arrival, t, reason, live.prompt_tokens, live.num_tokens, queue, ttft, itl))

    def step(self, t: float, used: int, total: int, rows: int, preempted: int, seconds: float | None = None) -> None:
        """A step ended at t: KV blocks in use of all, rows in it, requests it preempted. Its time is `seconds`, else what has
        passed since the step before, if something ran all the while."""
        self._counters["steps"] += 1
        self._counters["num_preemptions"] += preempted
        self._usage = used / total if total else 0.0
        self._usage_peak = max(self._usage_peak, self._usage)
        self._usage_sum += self._usage
        self._histograms["step_rows"].add(rows)
        if seconds is None and self._last_step is not None:
            seconds = t - self._last_step
        if seconds is not None:
            self._histograms["step_seconds"].add(seconds)
        self._last_step = t

    def snapshot(self) -> dict[str, Any]:
        """Plain data; names are vLLM's Prometheus names without `vllm:`, counters also without `_total`.

        counters    {name: int}, only ever growing: prompt_tokens, generation_tokens, num_preemptions, prefix_cache_queries and
                    prefix_cache_hits (tokens), steps
        finished    {reason: int}: request_success_total{finished_reason}
        gauges      num_requests_waiting, num_requests_running, kv_cache_usage_perc (0 to 1, of the last step), and its
                    kv_cache_usage_peak and kv_cache_usage_mean over all steps
        histograms  {name: {buckets: [(upper bound, values at or under it)], sum, count}}, the last bound is infinity:
                    time_to_first_token_seconds, inter_token_latency_seconds, e2e_request_latency_seconds,
                    request_queue_time_seconds, step_seconds, step_rows
        recent      of the last `keep` requests: requests, output_tokens, seconds (first arrival to last end),
                    tokens_per_second, and queue, ttft, e2e and (of the last `keep` gaps) itl, each
                    {mean, p50, p90, p99}, NaN without values
        """
        steps = self._counters["steps"]
        span = self._span()
        output = sum(r.num_tokens for r in self.recent)
        return {
            "counters": dict(self._counters),
            "finished": dict(self._reasons),
            "gauges": {
                "num_requests_waiting": len(self._live) - self._running,
                "num_requests_running": self._running,
                "kv_cache_usage_perc": self._usage,
                "kv_cache_usage_peak": self._usage_peak,
                "kv_cache_usage_mean": self._usage_sum / steps if steps else 0.0,
            },
            "histograms": {name: h.snapshot() for name, h in self._histograms.items()},
            "recent": {
                "requests": len(self.recent),
                "output_tokens": output,
                "seconds": span,
                "tokens_per_second": output / span if span else 0.0,
                "queue": _summary(r.queue for r in self.recent),
                "ttft": _summary(r.ttft for r in self.recent),
                "e2e": _summary(r.e2e for r in self.recent if r.reason not in FAILED),
                "itl": _summary(self._gaps),
            },
        }

    def goodput(self, ttft: float, itl: float) -> float:
        """Requests a second, of the last `keep`, that ended by themselves with TTFT <= ttft and a mean gap <= itl."""
        good = [r for r in self.recent if r.reason not in FAILED and r.ttft is not None and r.ttft <= ttft and r.itl <= itl]
        span = self._span()
        return len(good) / span if span else 0.0

    def _span(self) -> float:
        if not self.recent:
            return 0.0
        return max(r.end for r in self.recent) - min(r.arrival for r in self.recent)


def _summary(values: Iterable[float | None]) -> dict[str, float]:
    known = [v for v in values if v is not None]
    mean = sum(known) / len(known) if known else math.nan
    return {"mean": mean, **{f"p{q}": percentile(known, q) for q in (50, 90, 99)}}


def percentile(values: Sequence[float], q: float) -> float:
    """The value under which q percent lie, interpolated between neighbours; NaN of none. ValueError unless q is 0 to 100."""
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile is from 0 to 100, got {q}")
    return float(np.percentile(values, q)) if len(values) else math.nan


def poisson(rate: float, n: int, seed: int) -> list[float]:
    """n arrival times in seconds, ascending, of independent clients that send `rate` requests a second together: gaps are
    exponential. An infinite rate sends all at 0. ValueError unless rate > 0."""
    if not rate > 0:
        raise ValueError(f"a rate is over 0, got {rate}")
    return np.random.default_rng(seed).exponential(1 / rate, n).cumsum().tolist()
