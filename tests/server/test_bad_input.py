"""What is wrong with a request is said in OpenAI's error shape, names the field and what is allowed; the server goes on."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from serving import MODEL, WINDOW, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "a block"}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL, "messages": [USER], "max_tokens": 2, **fields}


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"model": MODEL, "prompt": "a block", "max_tokens": 2, **fields}


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return chat(messages=[fields])


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    assert isinstance(body["error"]["code"], str)
    return body["error"]


BAD: list[tuple[tuple[str, dict[str, Any]], int, str | None, list[str]]] = [
    # values that are out of bounds
    (chat(temperature=-0.1), 400, "temperature", ["temperature", "0 to 100", "-0.1"]),
    (chat(temperature=101), 400, "temperature", ["0 to 100"]),
    (chat(top_p=0), 400, "top_p", ["over 0", "at most 1"]),
    (chat(top_p=1.5), 400, "top_p", ["at most 1"]),
    (chat(top_k=-2), 400, "top_k", ["-1 or 0"]),
    (chat(min_p=2), 400, "min_p", ["0 to 1"]),
    (chat(presence_penalty=3), 400, "presence_penalty", ["-2 to 2"]),
    (chat(frequency_penalty=-3), 400, "frequency_penalty", ["-2 to 2"]),
    (chat(repetition_penalty=0), 400, "repetition_penalty", ["0.01"]),
    (chat(repetition_penalty=1e-45), 400, "repetition_penalty", ["0.01"]),
    (chat(top_k=2**31), 400, "top_k", ["2147483647"]),
    (chat(top_k=2**70), 400, "top_k", ["2147483647"]),
    (chat(max_tokens=2**70), 400, "max_tokens", ["at most"]),
    (chat(stop_token_ids=[2**70]), 400, "stop_token_ids", ["token ids"]),
    (message(**{"role": "user", "content": "x", "a\nb": 1}), 400, "messages[0].a\\nb", ["not supported"]),
    (message(role="x" * 5000, content="x"), 400, "messages[0].role", ["…"]),
    (chat(metadata={"a\nb": 1}), 400, "metadata.a\\nb", ["string"]),
    (chat(seed=2**64), 400, "seed", ["64 bits"]),
    (chat(max_tokens=0), 400, "max_tokens", ["at least 1"]),
    (chat(max_tokens=-5), 400, "max_tokens", ["at least 1"]),
    (chat(max_tokens=3, max_completion_tokens=4), 400, "max_completion_tokens", ["max_tokens", "differ"]),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", ["0 to 20"]),
    (chat(top_logprobs=2), 400, "top_logprobs", ["logprobs: true"]),
    (text(logprobs=21), 400, "logprobs", ["0 to 20"]),
    (text(logprobs=-1), 400, "logprobs", ["0 to 20"]),
    (chat(stop=[]), 200, None, []),
    (chat(stop=""), 400, "stop", ["non-empty"]),
    (chat(stop=["a", ""]), 400, "stop", ["non-empty"]),
    (chat(stop=["x"] * 17), 400, "stop", ["at most 16", "17"]),
    (chat(stop_token_ids=[-1]), 400, "stop_token_ids", ["stop_token_ids"]),
    (chat(stop_token_ids=[10**6]), 400, "stop_token_ids[0]", ["1000000", "0 to "]),
    # types: nothing is read as what it is not
    (chat(temperature="0.7"), 400, "temperature", ["a number", '"0.7"']),
    (chat(temperature=True), 400, "temperature", ["a number", "true"]),
    (chat(max_tokens="5"), 400, "max_tokens", ["an integer", '"5"']),
    (chat(max_tokens=5.5), 400, "max_tokens", ["an integer", "5.5"]),
    (chat(seed="x"), 400, "seed", ["an integer"]),
    (chat(stream="yes"), 400, "stream", ["true or false"]),
    (chat(stream=1), 400, "stream", ["true or false"]),
    (chat(ignore_eos="no"), 400, "ignore_eos", ["true or false"]),
    (chat(logprobs=3), 400, "logprobs", ["true or false"]),
    (text(logprobs=True), 400, "logprobs", ["an integer"]),
    (chat(stop=3), 400, "stop", ["string or a list"]),
    (chat(stop=[1, 2]), 400, "stop", ["string or a list"]),
    (chat(stop_token_ids="3"), 400, "stop_token_ids", ["a list"]),
    (chat(stop_token_ids=["3"]), 400, "stop_token_ids[0]", ["an integer"]),
    (chat(stream_options=True, stream=True), 400, "stream_options", ["an object"]),
    (chat(stream_options={"include_usage": 1}, stream=True), 400, "stream_options.include_usage", ["true or false"]),
    (chat(stream_options={"other": 1}, stream=True), 400, "stream_options.other", ["not a known field"]),
    (chat(stream_options={"include_usage": True}), 400, "stream_options", ["stream: true"]),
    (chat(metadata={"a": 1}), 400, "metadata.a", ["a string"]),
    (chat(user=5), 400, "user", ["a string"]),
    # fields that are not taken
    (chat(store=True), 400, "store", ["store must be false"]),
    (chat(n=2), 400, "n", ["n is not supported"]),
    (chat(n=1), 400, "n", ["not supported"]),
    (chat(tools=[]), 400, "tools", ["not supported"]),
    (chat(tools=None), 400, "tools", ["not supported"]),
    (chat(response_format={"type": "json_object"}), 400, "response_format", ["not supported"]),
    (chat(logit_bias={"1": 2}), 400, "logit_bias", ["not supported"]),
    (chat(temprature=1), 400, "temprature", ["temprature", "not a known field", "temperature"]),
    (chat(prompt="x"), 400, "prompt", ["not a known field", "messages"]),
    (text(echo=True), 400, "echo", ["not supported"]),
    (text(best_of=1), 400, "best_of", ["not supported"]),
    (text(suffix="x"), 400, "suffix", ["not supported"]),
    (text(messages=[USER]), 400, "messages", ["not a known field", "prompt"]),
    (chat(n=2, temperature="hot"), 400, "n", ["not supported"]),
    # the model
    (chat(model="gpt-4"), 404, "model", ["'gpt-4'", repr(MODEL)]),
    (chat(model=5), 400, "model", ["a string"]),
    ((CHAT, {"messages": [USER]}), 400, "model", ["model is required"]),
    # messages
    ((CHAT, {"model": MODEL}), 400, "messages", ["messages is required"]),
    (chat(messages=[]), 400, "messages", ["at least one message"]),
    (chat(messages="hello"), 400, "messages", ["a list"]),
    (chat(messages=["hello"]), 400, "messages[0]", ["an object", '"hello"']),
    (message(content="x"), 400, "messages[0].role", ["role", "user", "assistant"]),
    (message(role="robot", content="x"), 400, "messages[0].role", ["robot", "system", "user", "assistant"]),
    (message(role=None, content="x"), 400, "messages[0].role", ["role"]),
    (message(role=["user"], content="x"), 400, "messages[0].role", ["role"]),
    (message(role="user"), 400, "messages[0].content", ["content", "string"]),
    (message(role="user", content=None), 400, "messages[0].content", ["string"]),
    (message(role="user", content=5), 400, "messages[0].content", ["string"]),
    (message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]), 400, "messages[0].content[0]", ["text"]),
    (message(role="user", content=["x"]), 400, "messages[0].content[0]", ["text"]),
    (message(role="user", content=[{"type": "text", "text": 5}]), 400, "messages[0].content[0].text", ["string"]),
    (message(role="user", content="x", name="me"), 400, "messages[0].name", ["not supported"]),
    (message(role="tool", content="x"), 400, "messages[0].role", ["tool", "system", "user", "assistant"]),
    (message(role="user", content="x", tool_call_id="c"), 400, "messages[0].tool_call_id", ["not supported"]),
    (chat(messages=[USER, {"role": "user", "content": "tools"}]), 400, "messages", ["tools are not for this model"]),
    # prompts
    ((TEXT, {"model": MODEL}), 400, "prompt", ["prompt is required"]),
    (text(prompt=""), 400, "prompt", ["no token"]),
    (text(prompt=[]), 400, "prompt", ["lists of token ids"]),
    (text(prompt=[[]]), 400, "prompt", ["empty"]),
    (text(prompt=None), 400, "prompt", ["must be a string"]),
    (text(prompt=5), 400, "prompt", ["must be a string", "5"]),
    (text(prompt={"a": 1}), 400, "prompt", ["must be a string"]),
    (text(prompt=["a", 1]), 400, "prompt", ["must be a string"]),
    (text(prompt=[1, 2.5]), 400, "prompt", ["must be a string"]),
    (text(prompt=[1, True]), 400, "prompt", ["must be a string"]),
    (text(prompt=["a"] * 129), 400, "prompt", ["at most 128", "129"]),
    (text(prompt=[1, -1]), 400, "prompt[1]", ["-1", "0 to "]),
    (text(prompt=[1, 10**6]), 400, "prompt[1]", ["1000000", "0 to "]),
    (text(prompt=[1, 2**80]), 400, "prompt[1]", ["0 to "]),
    # more than the window
    (text(prompt=[1] * WINDOW), 400, "prompt", [str(WINDOW), "window"]),
    (text(prompt=[1] * 100, max_tokens=200), 400, "max_tokens", [str(WINDOW), "100", "200", "300", "156"]),
    (chat(max_tokens=10**9), 400, "max_tokens", [str(WINDOW), "1000000000"]),
    (chat(max_tokens=None, max_completion_tokens=10**9), 400, "max_completion_tokens", [str(WINDOW)]),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "status", "param", "words"), BAD, ids=range(len(BAD)))
def test_bad_fields(
    http: httpx.Client, request_: tuple[str, dict[str, Any]], status: int, param: str | None, words: list[str]
) -> None:
    path, body = request_
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    if status == 200:
        return
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"], error


def test_codes_that_programs_rely_on(http: httpx.Client) -> None:
    for (path, body), code in (
        (chat(model="gpt-4"), "model_not_found"),
        (chat(max_tokens=10**6), "context_length_exceeded"),
        (chat(n=2), "unsupported_parameter"),
        (chat(nope=2), "unknown_parameter"),
        (chat(temperature="x"), "invalid_type"),
    ):
        assert error_of(http.post(path, json=body))["code"] == code


RAW = [
    (b"", 400, "not valid JSON"),
    (b"{", 400, "not valid JSON"),
    (b"{'model': 1}", 400, "not valid JSON"),
    (b'{"model": NaN}', 400, "not valid JSON"),
    (b"\xff\xfe", 400, "not valid JSON"),
    (b"[" * 100_000, 400, "not valid JSON"),
    (b'{"a":' * 100_000, 400, "not valid JSON"),
    (b'{"model":"\\ud800"}', 400, "not valid JSON"),
    (b"[]", 400, "the body must be an object"),
    (b"null", 400, "the body must be an object"),
    (b'"text"', 400, "the body must be an object"),
    (b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"temperature":1e999}', 400, "temperature"),
    (b'{"":1}', 400, "not a known field"),
]


@pytest.mark.parametrize(("body", "status", "words"), RAW, ids=range(len(RAW)))
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bodies_that_are_no_json_object(http: httpx.Client, path: str, body: bytes, status: int, words: str) -> None:
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    if path == CHAT or "temperature" not in words:
        assert words in error_of(response)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data; boundary=x"])
def test_a_body_of_another_type(http: httpx.Client, kind: str) -> None:
    response = http.post(CHAT, content=b"{}", headers={"content-type": kind})
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


def test_a_charset_beside_the_type_is_no_fault(http: httpx.Client) -> None:
    path, body = chat()
    response = http.post(path, content=json.dumps(body), headers={"content-type": "Application/JSON; charset=utf-8"})
    assert response.status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_over_4_mib(http: httpx.Client, declared: bool) -> None:
    path, body = text(prompt="a" * 5 * 2**20)
    raw = json.dumps(body).encode()
    pieces = (raw[i : i + 65536] for i in range(0, len(raw), 65536))
    response = http.post(path, content=raw if declared else pieces, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert "4 MiB" in error_of(response)["message"]


def test_a_body_just_under_4_mib_is_read_and_judged(http: httpx.Client) -> None:
    path, body = text(prompt=[1] * 2_000_000)
    response = http.post(path, json=body)
    assert int(response.request.headers["content-length"]) > 3.5 * 2**20
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/nothing", 404, "/v1/chat/completions"),
        ("POST", "/v1/chat", 404, "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/", 404, "/v1/chat/completions"),
        ("POST", "/v1/embeddings", 404, "/v1/completions"),
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET"),
        ("POST", "/", 405, "GET"),
        ("GET", "/v1/models/other", 404, MODEL),
        ("GET", "/v1/models/a/b", 404, MODEL),
        ("GET", "/%00%ff", 404, "nothing at"),
    ],
)
def test_routes_and_methods(http: httpx.Client, method: str, path: str, status: int, words: str) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    assert words in error_of(response)["message"]


def test_the_key_guards_v1_alone(tmp_path: Any) -> None:
    with serving(tmp_path, api_key="sésame-1") as served, httpx.Client(base_url=served.url, timeout=20) as http:
        path, body = chat()
        for header in (None, "", "Bearer", "Bearer wrong", "Basic sésame-1", "sésame-1", "Bearer sésame-1x"):
            headers = {} if header is None else {"authorization": header.encode()}
            response = http.post(path, json=body, headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401, header
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
            assert "sésame" not in response.text
        assert http.get("/v1/models").status_code == 401
        key = {"authorization": "Bearer sésame-1".encode()}
        assert http.post(path, json=body, headers=key).status_code == 200  # type: ignore[arg-type]
        assert http.get("/v1/models", headers=key).status_code == 200  # type: ignore[arg-type]
        for open_path in ("/health", "/ready", "/metrics", "/"):
            assert http.get(open_path).status_code == 200
        assert http.get("/health").json()["api_key_required"] is True


NAMES = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "stop_token_ids", "logprobs", "top_logprobs", "stream", "stream_options", "ignore_eos", "user", "metadata", "store",
    "n", "x",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
]  # fmt: skip


def some_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(12 if depth < 3 else 9)
    if kind >= 10:
        keys = ["role", "content", "type", "text", "include_usage", "", "a"]
        return {rng.choice(keys): some_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind == 9:
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return [None, True, False, rng.randrange(-3, 5), rng.choice([2**31, 2**63, -(2**64), 10**30]), rng.uniform(-3, 3),
            rng.choice(["", "user", "text", MODEL, "\x00", "é\U0001f600", "<|eos|>"]), 1e308, 0][kind]  # fmt: skip


def test_random_bodies_never_break_the_server(http: httpx.Client) -> None:
    rng = random.Random(20)
    seen = {200: 0, 400: 0, 404: 0}
    for _ in range(400):
        path, body = rng.choice([chat, text])()
        for name in rng.sample(NAMES, rng.choice([1, 1, 1, 2, 5])):
            body[name] = some_value(rng)
        if rng.random() < 0.2:
            body.pop(rng.choice(list(body)))
        response = http.post(path, json=body)
        assert response.status_code in seen, (path, body, response.text)
        seen[response.status_code] += 1
        if response.status_code != 200:
            error_of(response)
    assert min(seen[200], seen[400]) > 10, seen
    path, body = chat()
    assert http.post(path, json=body).status_code == 200
