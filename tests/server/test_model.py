"""The built-in model over HTTP, with the client that people use: the answers are those that transformers gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from processes import serve_process, url_of

from cutaway.checkpoints import open_checkpoint, resolve
from cutaway.engine.config import EngineConfig
from cutaway.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]

NAME = EngineConfig().model
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "smollm2.json").read_text())
CASE = next(case for case in GOLDEN["cases"] if case["name"] == "short")
N = 12  # tokens; the two best are far apart for all of them
BLOCKS = 129


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = {"model": NAME, "dtype": "fp32", "max_model_len": 512, "kv_blocks": BLOCKS, "threads": 1}
    with serve_process(config, {}) as server:
        yield url_of(server)


@pytest.fixture(scope="module")
def openai(url: str) -> Iterator[Any]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def golden_text() -> str:
    tokenizer = Tokenizer.open(open_checkpoint(resolve(NAME)).text())
    return tokenizer.decode(CASE["greedy"][:N])


def test_a_greedy_completion_is_the_golden_one(openai: Any, golden_text: str) -> None:
    assert min(CASE["margins"][:N]) > 0.1
    for prompt in (CASE["text"], CASE["ids"]):
        answer = openai.completions.create(model=NAME, prompt=prompt, max_tokens=N, temperature=0, logprobs=1)
        assert answer.choices[0].text == golden_text
        assert answer.usage.prompt_tokens == len(CASE["ids"])
        assert "".join(answer.choices[0].logprobs.tokens) == golden_text
        for logprob, top in zip(
            answer.choices[0].logprobs.token_logprobs, answer.choices[0].logprobs.top_logprobs, strict=True
        ):
            assert logprob == pytest.approx(max(top.values()))
            assert -5 < logprob < 0


def test_several_prompts_do_not_disturb_each_other(openai: Any, golden_text: str) -> None:
    prompts = ["Once upon a time", CASE["text"], "1 2 3 4"]
    answer = openai.completions.create(model=NAME, prompt=prompts, max_tokens=N, temperature=0)
    assert answer.choices[1].text == golden_text


def test_a_chat_streams_what_it_answers(openai: Any) -> None:
    ask: dict[str, Any] = {
        "model": NAME, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12, "temperature": 0.8,
        "seed": 11,
    }  # fmt: skip
    whole = openai.chat.completions.create(**ask)
    chunks = list(openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert "<|im_" not in whole.choices[0].message.content


def test_the_end_of_the_answer_is_the_model_s_own(openai: Any) -> None:
    ask: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "What is 2+2?"}], "temperature": 0}
    answer = openai.chat.completions.create(**ask, max_tokens=60)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason is None
    on = openai.chat.completions.create(**ask, max_tokens=answer.usage.completion_tokens + 4, extra_body={"ignore_eos": True})
    assert on.choices[0].finish_reason == "length"
    assert on.usage.completion_tokens == answer.usage.completion_tokens + 4


def test_the_window_is_said(openai: Any) -> None:
    with pytest.raises(BadRequestError, match=r"512.*600") as raised:
        openai.completions.create(model=NAME, prompt="x", max_tokens=600)
    assert raised.value.code == "context_length_exceeded"


def test_all_is_free_when_all_have_ended(url: str) -> None:
    kv = httpx.get(f"{url}/health", timeout=20).json()["kv"]
    assert kv["used"] == 1
    assert kv["free"] + kv["cached"] + kv["used"] == kv["total"] == BLOCKS
