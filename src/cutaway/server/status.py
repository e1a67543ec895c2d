"""What the server says of itself: /health (JSON, for people and probes), /ready (for load balancers), /metrics (Prometheus)."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.responses import Response

from cutaway.server.errors import json_response
from cutaway.server.service import Service

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def blocks_of(service: Service) -> dict[str, int]:
    """The KV pool: free + cached + used = total; used includes the dummy block. Before the first step all is free."""
    stats = service.channel.stats
    total = int(service.channel.ready.get("kv_blocks", 0))
    if stats is None:
        return {"total": total, "free": max(total - 1, 0), "cached": 0, "used": min(total, 1)}
    return {"total": stats.total, "free": stats.free, "cached": stats.cached, "used": stats.used}


def health(service: Service) -> Response:
    """200 while the engine is up, 503 otherwise; the same body."""
    channel, front, stats = service.channel, service.front, service.channel.stats
    ready = channel.ready
    body: dict[str, Any] = {
        "status": "ok" if service.up else "stopping" if service.closing else "down",
        "model": front.model_name,
        "window": front.window,
        "api_key_required": service.api_key is not None,
        "engine": {
            "state": channel.state,
            "failure": channel.failure,
            "restarts": getattr(channel, "restarts", 0),
            "step": getattr(stats, "step", 0),
            **{
                name: ready[name]
                for name in ("rows", "budget", "depth", "prefix_cache", "preemption", "backend")
                if name in ready
            },
        },
        "requests": {
            "active": service.engine.num_active,
            "running": getattr(stats, "running", 0),
            "waiting": getattr(stats, "waiting", 0),
        },
        "kv": {"block_size": front.block_size, "bytes": ready.get("kv_bytes", 0), **blocks_of(service)},
        "parts": parts_report(service),
        "uptime_seconds": round(time.time() - service.started, 3),
        "versions": {"cutaway": service.version, "python": platform.python_version()},
    }
    return json_response(body, 200 if service.up else 503)


def parts_report(service: Service) -> dict[str, Any]:
    """Whose file plays each part. What the engine's process reports of its own parts goes before what the front knows."""
    report = service.parts.report()
    for name, entry in (service.channel.ready.get("parts") or {}).items():
        if entry.get("process") == "engine":
            report[name] = entry
    for name, line in getattr(service.channel, "dropped", {}).items():
        report[name]["dropped"] = line
    return report


def ready(service: Service) -> Response:
    """200 only while requests are taken."""
    state = "stopping" if service.closing else service.channel.state
    return json_response({"ready": service.up, "state": state}, 200 if service.up else 503)


# ---- Prometheus ----------------------------------------------------------------------------------------------------------

# part 16's counters and histograms that mean what vLLM's of the same name mean; the others go under cutaway:
VLLM = frozenset({
    "prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits",
    "request_queue_time_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
})  # fmt: skip
NOT_KNOWN_HERE = frozenset({"steps"})  # counted by the engine, because the figures of several may arrive at once
HELP = {
    "prompt_tokens": "Prompt tokens of requests that a step has worked on",
    "generation_tokens": "Tokens generated",
    "num_preemptions": "Requests that gave their blocks back and waited again",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found there",
    "steps": "Engine steps",
    "request_queue_time_seconds": "The engine's taking a request to its first step",
    "time_to_first_token_seconds": "Arrival to the first token",
    "inter_token_latency_seconds": "The gap before each further token",
    "e2e_request_latency_seconds": "Arrival to the end, of requests that were not cut off",
    "step_seconds": "Time of a step",
    "step_rows": "Requests in a step",
}


class Exporter(Collector):
    """Reads the figures when asked; nothing is counted twice."""

    def __init__(self, service: Service):
        self.service = service
        self.labels, self.values = ["model_name"], [service.front.model_name]

    def collect(self) -> Iterable[Metric]:
        snapshot = self.service.metrics.snapshot()
        yield from self._counters(snapshot.get("counters", {}))
        yield self._finished(snapshot.get("finished", {}))
        yield from self._histograms(snapshot.get("histograms", {}))
        yield from self._engine()

    def _name(self, name: str) -> str:
        return f"{'vllm' if name in VLLM else 'cutaway'}:{name}"

    def _counters(self, counters: Mapping[str, float]) -> Iterable[Metric]:
        steps = getattr(self.service.channel.stats, "step", 0)
        for name, value in {**{n: v for n, v in counters.items() if n not in NOT_KNOWN_HERE}, "steps": steps}.items():
            family = CounterMetricFamily(self._name(name), HELP.get(name, name), labels=self.labels)
            family.add_metric(self.values, value)
            yield family

    def _finished(self, finished: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason", labels=[*self.labels, "finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            family.add_metric([*self.values, reason], finished.get(reason, 0))
        return family

    def _histograms(self, histograms: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
        for name, h in histograms.items():
            if name in NOT_KNOWN_HERE:
                continue
            family = HistogramMetricFamily(self._name(name), HELP.get(name, name), labels=self.labels)
            buckets = [(floatToGoString(bound), count) for bound, count in h["buckets"]]
            family.add_metric(self.values, buckets, h["sum"])
            yield family

    def _engine(self) -> Iterable[Metric]:
        service, stats, blocks = self.service, self.service.channel.stats, blocks_of(self.service)
        usable = blocks["total"] - 1  # the dummy block is nobody's
        share = (blocks["used"] - 1) / usable if usable > 0 else 0.0
        gauges = {
            "vllm:num_requests_running": ("Requests that hold a row", getattr(stats, "running", 0)),
            "vllm:num_requests_waiting": ("Requests that wait for one", getattr(stats, "waiting", 0)),
            "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", share),
            "cutaway:requests_active": ("Requests that the server follows", service.engine.num_active),
            "cutaway:engine_up": ("Whether the engine takes requests", float(service.up)),
        }
        for name, (help, value) in gauges.items():
            gauge = GaugeMetricFamily(name, help, labels=self.labels)
            gauge.add_metric(self.values, value)
            yield gauge
        kv = GaugeMetricFamily("cutaway:kv_blocks", "KV blocks; used includes the dummy block", labels=[*self.labels, "state"])
        for state in ("used", "cached", "free"):
            kv.add_metric([*self.values, state], blocks[state])
        yield kv
        swapped = CounterMetricFamily(
            "cutaway:swapped_blocks",
            "KV blocks copied to the host, and back",
            labels=[*self.labels, "direction"],
        )
        for direction in ("out", "in"):
            swapped.add_metric([*self.values, direction], getattr(stats, f"swapped_{direction}", 0))
        yield swapped
        restarts = CounterMetricFamily("cutaway:engine_restarts", "Times the engine process was restarted", labels=self.labels)
        restarts.add_metric(self.values, getattr(service.channel, "restarts", 0))
        yield restarts


def metrics_endpoint(service: Service) -> Callable[[], Response]:
    """Prometheus' text format, from a registry of this server alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exporter(service))
    return lambda: Response(generate_latest(registry), media_type=PROMETHEUS)
