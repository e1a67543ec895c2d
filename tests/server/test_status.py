"""/health, /ready, /metrics, the page and the description of the API."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families
from serving import MODEL, WINDOW, Served, serving, until

from cutaway.engine.parts import PARTS

ASK: dict[str, Any] = {
    "model": MODEL,
    "prompt": "the table maps each page to a block of sixteen",
    "max_tokens": 12,
    "temperature": 0,
}


def test_health_adds_up_and_names_the_parts(http: httpx.Client) -> None:
    http.post("/v1/completions", json=ASK)
    health = http.get("/health").json()
    assert health["status"] == "ok"
    assert health["model"] == MODEL
    assert health["window"] == WINDOW
    assert health["api_key_required"] is False
    assert health["engine"]["state"] == "ready"
    assert health["engine"]["step"] > 0
    assert health["engine"]["rows"] == 16
    kv = health["kv"]
    assert kv["free"] + kv["cached"] + kv["used"] == kv["total"] == 129
    assert kv["block_size"] == 16
    assert set(health["parts"]) == set(PARTS)
    assert all(p["reference"] for p in health["parts"].values())
    assert health["versions"]["cutaway"] == "0.test"


def test_ready(http: httpx.Client) -> None:
    response = http.get("/ready")
    assert (response.status_code, response.json()) == (200, {"ready": True, "state": "ready"})


def families(http: httpx.Client) -> dict[str, Any]:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {f.name: f for f in text_string_to_metric_families(response.text)}


def value(family: Any, **labels: str) -> float:
    found = [s.value for s in family.samples if labels.items() <= s.labels.items() and not s.name.endswith("_created")]
    assert len(found) == 1, family.samples
    return found[0]


def test_metrics_count_what_happened(tmp_path: Any) -> None:
    with serving(tmp_path) as served, httpx.Client(base_url=served.url, timeout=20) as http:
        before = families(http)
        assert value(before["vllm:generation_tokens"]) == 0
        assert value(before["cutaway:engine_up"]) == 1
        for _ in range(2):
            usage = http.post("/v1/completions", json=ASK).json()["usage"]
        text = http.post("/v1/completions", json=ASK).json()["choices"][0]["text"]
        http.post("/v1/completions", json={**ASK, "stop": text[3:6]})
        http.post("/v1/completions", json={**ASK, "temperature": -1})  # refused: no request
        until(lambda: served.service.channel.stats.running == 0)
        after = families(http)
    finished = after["vllm:request_success"]
    assert value(finished, finished_reason="length") == 3
    assert value(finished, finished_reason="stop") == 1
    assert value(finished, finished_reason="abort") == 0
    assert {s.labels["model_name"] for s in finished.samples} == {MODEL}
    assert 36 < value(after["vllm:generation_tokens"]) <= 48
    assert value(after["vllm:prompt_tokens"]) == 4 * usage["prompt_tokens"]
    assert value(after["vllm:prefix_cache_hits"]) == 3 * usage["prompt_tokens_details"]["cached_tokens"]
    ttft = after["vllm:time_to_first_token_seconds"]
    assert [s.value for s in ttft.samples if s.name.endswith("_count")] == [4]
    assert [s.value for s in ttft.samples if s.labels.get("le") == "+Inf"] == [4]
    queued, waited = (
        {s.name.rpartition("_")[2]: s.value for s in family.samples if not s.labels.get("le")}
        for family in (after["vllm:request_queue_time_seconds"], ttft)
    )
    assert queued["count"] == 4
    assert 0 <= queued["sum"] < waited["sum"]  # the first step's own time is no waiting
    blocks = {s.labels["state"]: s.value for s in after["cutaway:kv_blocks"].samples}
    assert sum(blocks.values()) == 129
    assert blocks["used"] == 1
    assert value(after["vllm:num_requests_running"]) == 0
    assert value(after["vllm:kv_cache_usage_perc"]) == 0
    assert value(after["cutaway:steps"]) > 10


def test_an_aborted_request_is_counted_as_that(tmp_path: Any) -> None:
    with serving(tmp_path, "slow") as served, httpx.Client(base_url=served.url) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={**ASK, "max_tokens": 200}, timeout=0.2)
        until(lambda: served.service.engine.num_active == 0)
        assert value(families(http)["vllm:request_success"], finished_reason="abort") == 1


# ---- the page ------------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    response = http.get("/")
    assert response.headers["content-type"].startswith("text/html")
    page = response.text
    outside = re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]+)""", page)
    assert all(link.startswith(("data:", "/")) for link in outside)
    assert "@import" not in page
    assert all(link.startswith("#") for link in re.findall(r"url\(([^)]*)\)", page))
    called = re.findall(r'fetch\("([^"]+)"', page)
    assert set(called) == {"/v1/chat/completions", "/health"}


def test_the_page_s_policy_lets_its_own_style_and_script_in_and_nothing_else(http: httpx.Client) -> None:
    response = http.get("/")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    for tag in ("style", "script"):
        inner = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        assert len(inner) == 1
        digest = base64.b64encode(hashlib.sha256(inner[0].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    # what the policy would silently drop
    assert not re.search(r"\sstyle\s*=", response.text)
    assert not re.search(r"\son\w+\s*=\s*[\"']", response.text)
    assert response.headers["x-content-type-options"] == "nosniff"


def test_every_element_that_the_page_s_script_asks_for_is_there(http: httpx.Client) -> None:
    page = http.get("/").text
    ids = set(re.findall(r'\sid="([^"]+)"', page))
    assert set(re.findall(r'\$\("([^"]+)"\)', page)) <= ids
    labelled = set(re.findall(r'<label for="([^"]+)"', page))
    assert set(re.findall(r'<(?:input|textarea)[^>]*\sid="([^"]+)"', page)) == labelled


# ---- the description -------------------------------------------------------------------------------------------------------


def test_openapi_describes_the_bodies(http: httpx.Client, served: Served) -> None:
    described = http.get("/openapi.json").json()
    for path, sample in (
        ("/v1/completions", ASK),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stop": ["a"]}),
    ):
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema)
        assert list(validator.iter_errors(sample)) == []
        assert list(validator.iter_errors({**sample, "n": 2}))
        assert list(validator.iter_errors({**sample, "temperature": "hot"}))
    assert "$ref" not in str(described["paths"]["/v1/completions"]["post"]["requestBody"])
