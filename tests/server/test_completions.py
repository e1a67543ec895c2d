"""The happy paths, with the client that people use."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import MODEL, WINDOW, Served, until

ASK: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "the table maps each page"}], "max_tokens": 24, "temperature": 0,
}  # fmt: skip
GO_ON: dict[str, Any] = {"model": MODEL, "prompt": "the quick brown", "max_tokens": 24, "temperature": 0}


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    """The data lines of a stream, as they are on the wire."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        raw = response.read().decode()
    assert raw.endswith("\n\n")
    lines = raw[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] for line in lines]


def test_a_chat_answer_has_openai_s_shape(openai: Any) -> None:
    answer = openai.chat.completions.create(**ASK)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.created > 1_600_000_000
    assert [c.index for c in answer.choices] == [0]
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_streamed_chat_concatenates_to_the_same_answer(openai: Any) -> None:
    whole = openai.chat.completions.create(**ASK).choices[0].message.content
    chunks = list(openai.chat.completions.create(**ASK, stream=True))
    assert len({c.id for c in chunks}) == 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(c.usage is None for c in chunks)


def test_usage_comes_last_with_no_choices_and_only_if_asked(openai: Any, http: httpx.Client) -> None:
    chunks = list(openai.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 24
    assert all(c.usage is None for c in chunks[:-1])
    with_usage = events(http, "/v1/chat/completions", {**ASK, "stream_options": {"include_usage": True}})
    assert all('"usage":null' in e for e in with_usage[:-2])
    assert with_usage[-1] == "[DONE]"
    without = events(http, "/v1/chat/completions", ASK)
    assert not any('"usage"' in e for e in without)
    assert without[-1] == "[DONE]"


def test_a_completion_and_its_stream(openai: Any) -> None:
    answer = openai.completions.create(**GO_ON)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    chunks = list(openai.completions.create(**GO_ON, stream=True, stream_options={"include_usage": True}))
    assert {c.object for c in chunks} == {"text_completion"}
    assert "".join(c.choices[0].text for c in chunks[:-1]) == answer.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 24


def test_a_completion_without_max_tokens_has_16_a_chat_the_rest_of_the_window(openai: Any) -> None:
    answer = openai.completions.create(model=MODEL, prompt="the", temperature=0)
    assert answer.usage.completion_tokens == 16
    chat = {k: v for k, v in ASK.items() if k != "max_tokens"}
    answer = openai.chat.completions.create(**chat)
    assert answer.usage.total_tokens == WINDOW
    assert answer.choices[0].finish_reason == "length"


def test_max_completion_tokens_is_the_same(openai: Any) -> None:
    chat = {k: v for k, v in ASK.items() if k != "max_tokens"}
    assert openai.chat.completions.create(**chat, max_completion_tokens=3).usage.completion_tokens == 3
    assert openai.chat.completions.create(**ASK, max_completion_tokens=24).usage.completion_tokens == 24


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_give_several_choices_in_order(openai: Any, served: Served, stream: bool) -> None:
    prompts = ["the table", "a block", "the quick brown fox"]
    alone = [openai.completions.create(**{**GO_ON, "prompt": p}) for p in prompts]
    ids = [served.service.front.tokenizer.encode(p) for p in prompts]  # type: ignore[attr-defined]
    for given in (prompts, ids):
        if stream:
            texts = ["", "", ""]
            finishes: dict[int, str] = {}
            for chunk in openai.completions.create(**{**GO_ON, "prompt": given}, stream=True):
                choice = chunk.choices[0]
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    assert choice.index not in finishes
                    finishes[choice.index] = choice.finish_reason
            assert finishes == dict.fromkeys(range(3), "length")
        else:
            answer = openai.completions.create(**{**GO_ON, "prompt": given})
            assert [c.index for c in answer.choices] == [0, 1, 2]
            texts = [c.text for c in answer.choices]
            assert answer.usage.prompt_tokens == sum(map(len, ids))
            assert answer.usage.completion_tokens == 72
        assert texts == [a.choices[0].text for a in alone]


def test_one_list_of_ids_is_one_prompt(openai: Any, served: Served) -> None:
    ids = served.service.front.tokenizer.encode(GO_ON["prompt"])  # type: ignore[attr-defined]
    answer = openai.completions.create(**{**GO_ON, "prompt": ids})
    assert len(answer.choices) == 1
    assert answer.choices[0].text == openai.completions.create(**GO_ON).choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(openai: Any, stream: bool) -> None:
    whole = openai.chat.completions.create(**ASK).choices[0].message.content
    stop = whole[6:9]
    assert stop
    if stream:
        chunks = list(openai.chat.completions.create(**ASK, stop=[stop, "never in it"], stream=True))
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        last = chunks[-1].choices[0]
    else:
        answer = openai.chat.completions.create(**ASK, stop=stop)
        last, text = answer.choices[0], answer.choices[0].message.content
        assert answer.usage.completion_tokens < 24
    assert text == whole[: whole.index(stop)]
    assert last.finish_reason == "stop"
    assert last.stop_reason == stop


def test_a_stop_id_ends_the_answer_and_is_named(openai: Any, served: Served) -> None:
    logprobs = openai.completions.create(**GO_ON, logprobs=0).choices[0].logprobs
    assert len(logprobs.tokens) == 24
    front = served.service.front
    id = next(i for i in range(290) if front.tokenizer.token_text(i) == logprobs.tokens[4])
    answer = openai.completions.create(**GO_ON, extra_body={"stop_token_ids": [id]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == id
    assert answer.usage.completion_tokens == 5


def test_a_seed_repeats_an_answer_and_its_absence_does_not(openai: Any) -> None:
    warm = {**ASK, "temperature": 1.0, "max_tokens": 48}
    one, other = (openai.chat.completions.create(**warm, seed=7).choices[0].message.content for _ in range(2))
    assert one == other
    assert one != openai.chat.completions.create(**warm, seed=8).choices[0].message.content
    free = {openai.chat.completions.create(**warm).choices[0].message.content for _ in range(3)}
    assert len(free) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(openai: Any, served: Served, stream: bool) -> None:
    settings = {**ASK, "logprobs": True, "top_logprobs": 2}
    if stream:
        content: list[Any] = []
        for chunk in openai.chat.completions.create(**settings, stream=True):
            if chunk.choices[0].logprobs:
                content += chunk.choices[0].logprobs.content
    else:
        content = openai.chat.completions.create(**settings).choices[0].logprobs.content
    assert len(content) == 24
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token
    without = openai.chat.completions.create(**ASK).choices[0].message.content
    assert b"".join(bytes(t.bytes) for t in content).decode("utf-8", "replace") == without


def test_logprobs_true_alone_gives_each_token_and_no_others(openai: Any) -> None:
    content = openai.chat.completions.create(**ASK, logprobs=True).choices[0].logprobs.content
    assert len(content) == 24
    assert all(t.top_logprobs == [] for t in content)


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(openai: Any, stream: bool) -> None:
    shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    if stream:
        for chunk in openai.completions.create(**GO_ON, logprobs=3, stream=True):
            for name in shape:
                shape[name] += getattr(chunk.choices[0].logprobs, name) if chunk.choices[0].logprobs else []
    else:
        answer = openai.completions.create(**GO_ON, logprobs=3).choices[0].logprobs
        shape = {name: getattr(answer, name) for name in shape}
    assert {len(v) for v in shape.values()} == {24}
    assert all(lp <= 0 for lp in shape["token_logprobs"])
    assert all(1 <= len(top) <= 3 for top in shape["top_logprobs"])
    assert shape["text_offset"][0] == 0
    assert shape["text_offset"] == sorted(shape["text_offset"])


def test_cached_prompt_tokens_are_counted(openai: Any) -> None:
    prompt = "sixteen tokens of one sequence, and then the fox goes on for a while so that more blocks than one are full"
    first = openai.completions.create(**{**GO_ON, "prompt": prompt}).usage
    second = openai.completions.create(**{**GO_ON, "prompt": prompt}).usage
    assert first.prompt_tokens > 32
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == (second.prompt_tokens - 1) // 16 * 16
    stream = list(openai.completions.create(**{**GO_ON, "prompt": prompt}, stream=True, stream_options={"include_usage": True}))
    assert stream[-1].usage.prompt_tokens_details.cached_tokens == second.prompt_tokens_details.cached_tokens


def test_fields_that_cannot_change_the_answer_are_taken(openai: Any) -> None:
    plain = openai.chat.completions.create(**ASK).choices[0].message.content
    same = openai.chat.completions.create(**ASK, user="somebody", metadata={"a": "b"}, store=False, stop=None, seed=None)
    assert same.choices[0].message.content == plain


def test_an_answer_can_be_sent_back_as_it_came(openai: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "the table"}]}]
    settings = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    message = openai.chat.completions.create(messages=messages, **settings).choices[0].message
    for again in (message, message.model_dump()):
        assert openai.chat.completions.create(
            messages=[*messages, again, {"role": "user", "content": "and the block?"}], **settings
        ).choices


def test_sampling_fields_beyond_openai_s_are_taken(openai: Any) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [300]}
    answer = openai.chat.completions.create(
        **{**ASK, "temperature": 0.5}, top_p=0.9, presence_penalty=0.5, frequency_penalty=-0.5, extra_body=extra
    )
    assert answer.usage.completion_tokens == 24


def test_models(openai: Any) -> None:
    models = openai.models.list().data
    assert [(m.id, m.object, m.owned_by) for m in models] == [(MODEL, "model", "cutaway")]
    assert openai.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_counts_agree_with_an_answer_that_a_stop_string_ends(openai: Any, stream: bool) -> None:
    whole = openai.chat.completions.create(**ASK).choices[0].message.content
    settings = {**ASK, "stop": whole[6:9], "logprobs": True}
    if stream:
        chunks = list(openai.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
        content = [t for c in chunks[:-1] if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
        text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
        usage = chunks[-1].usage
    else:
        answer = openai.chat.completions.create(**settings)
        content, usage, text = answer.choices[0].logprobs.content, answer.usage, answer.choices[0].message.content
    assert len(content) == usage.completion_tokens
    generated = b"".join(bytes(t.bytes) for t in content).decode("utf-8", "replace")
    assert generated.startswith(text)
    assert whole[6:9] in generated  # the tokens that completed the stop string are counted, those after it are not


def test_16_clients_at_once_get_what_each_gets_alone(served: Served) -> None:
    prompts = [f"{'the table maps ' * (i % 5)}page {i}" for i in range(16)]

    def text(prompt: str) -> str:
        with httpx.Client(base_url=served.url, timeout=60) as http:
            body = {**GO_ON, "prompt": prompt, "max_tokens": 60, "stop": ["never in it"]}
            chunks = [json.loads(e) for e in events(http, "/v1/completions", body)[:-1]]
        assert [c["choices"][0]["finish_reason"] for c in chunks].count("length") == 1
        return "".join(c["choices"][0]["text"] for c in chunks)

    alone = [text(p) for p in prompts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(text, prompts)) == alone


def test_a_client_that_does_not_read_holds_up_nobody(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({**ASK, "max_tokens": 200, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
    )
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect((host, int(port)))
        idle.sendall(head + body)
        with httpx.Client(base_url=served.url, timeout=10) as http:
            for _ in range(5):
                assert http.post("/v1/chat/completions", json=ASK).status_code == 200
    until(lambda: served.service.engine.num_active == 0)
