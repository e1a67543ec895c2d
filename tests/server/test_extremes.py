"""Valid requests with one extreme value each, through both processes to a real (tiny) model: none may hurt the others."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest
from processes import serve_process, url_of

import tiny

EXTREMES = {
    "temperature": [0, 1e-300, 1e-45, 1e-5, 100, 101],
    "top_k": [-1, 0, 1, 384, 385, 2**31 - 1, 2**31, 2**63, 2**64, 2**70, -2],
    "top_p": [1e-300, 1e-45, 1e-7, 1, 0.999999999],
    "min_p": [0, 1e-300, 1, 0.999999999],
    "repetition_penalty": [1e-45, 0.009, 0.01, 100, 101],
    "presence_penalty": [-2, 2, 1e-300],
    "frequency_penalty": [-2, 2, -1e-300],
    "seed": [0, -1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, 2**70],
    "max_tokens": [1, 2**31 - 1, 2**31, 2**63, 2**70],
    "stop_token_ids": [[0], [383], [384], [2**31], [2**63], [2**70], [-1], [0] * 5000],
    "stop": ["\x00", "é" * 1000, ["a"] * 16, ["a"] * 17],
    "logprobs": [0, 5, 20, 21, 2**63, 2**70],
    "ignore_eos": [True],
    "prompt": [[0], [383], [384], [2**63], [2**70], [-1], "\x00", [[1], [2]], "a" * 100_000],
}
PAIRS = 60  # two extremes at once


@pytest.mark.slow
def test_extremes_are_refused_or_answered_and_the_engine_lives(tmp_path: Path) -> None:
    model = tiny.write_folder(tmp_path / "tiny-qwen3", "qwen3")
    config = {"model": str(model), "max_model_len": 256, "kv_blocks": 40, "threads": 1}
    rng = random.Random(5)
    cases = [{name: value} for name, values in EXTREMES.items() for value in values]
    for _ in range(PAIRS):
        cases.append({name: rng.choice(EXTREMES[name]) for name in rng.sample(sorted(EXTREMES), 2)})
    seen = {200: 0, 400: 0}
    with serve_process(config, {}) as server, httpx.Client(base_url=url_of(server), timeout=30) as http:
        for case in cases:
            body = {"model": "tiny-qwen3", "prompt": "the state of", "max_tokens": 3} | case
            response = http.post("/v1/completions", json=body)
            assert response.status_code in seen, (case, response.text)
            assert len(response.content) < 20_000, case
            if response.status_code == 400:
                assert "\n" not in response.json()["error"]["message"], case
            seen[response.status_code] += 1
        health = http.get("/health").json()
    assert health["engine"]["restarts"] == 0
    assert min(seen.values()) > 20, seen
