"""Requests on their way to the engine, and answers on their way back to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from cutaway.core.errors import BadRequest, CutawayError, DoesNotFit
from cutaway.core.prefix_cache import chain
from cutaway.core.request import FinishReason, Output, SamplingParams, TokenLogprobs
from cutaway.core.text_assets import TextAssets, Vocabulary
from cutaway.engine.config import EngineConfig
from cutaway.engine.front import Front, TextStream
from cutaway.engine.parts import Parts
from cutaway.text.chat import ChatTemplate
from cutaway.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.content == 'tools' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
BOS, EOS, EOT = 256, 257, 258


def byte_names() -> list[str]:
    """Byte-level BPE's printable stand-ins, in the order of the bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(rest)) for b in range(256)]


def make(template: str | None = TEMPLATE, parts: Parts | None = None, window: int = 200) -> Front:
    """A front whose ids are bytes, with three special tokens."""
    tokens = [*byte_names(), "<s>", "</s>", "<|eot|>"]
    vocabulary = Vocabulary("gpt2", "default", tokens, types=[1] * 256 + [3] * 3)
    assets = TextAssets(
        "bytes", len(tokens), vocabulary=vocabulary, chat_template=template,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, bos_id=BOS, eos_ids=frozenset({EOS}), add_bos=True,
    )  # fmt: skip
    tokenizer = Tokenizer.open(assets)
    return Front("bytes", tokenizer, ChatTemplate.open(assets), tokenizer.eos_ids | {EOT}, window, parts or Parts())


def say(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


def test_a_prompt_becomes_a_request() -> None:
    front = make()
    request = front.complete("Hello, world, this is long enough", SamplingParams(max_tokens=5))
    assert request.tokens == [BOS, *b"Hello, world, this is long enough"]
    assert request.hashes == chain(request.tokens, 16)
    assert len(request.hashes) == 2
    assert (request.params.max_tokens, request.stop_ids, request.params.seed) == (5, {EOS, EOT}, None)
    assert front.complete([1, 2], SamplingParams()).tokens == [1, 2]
    assert front.complete("a", SamplingParams()).id == request.id + 2


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    front = make(window=20)
    text = "a" * (20 * front.tokenizer.longest)
    monkeypatch.setattr(type(front.tokenizer), "encode", lambda *_: pytest.fail("encoded"))
    with pytest.raises(DoesNotFit, match=r"at least 20 tokens; the window is 20"):
        front.complete(text, SamplingParams())


def test_max_tokens_and_the_window() -> None:
    front = make(window=20)
    asked = SamplingParams()
    assert front.complete([1] * 15, asked).params.max_tokens == 5
    assert asked.max_tokens is None  # the caller's own is not changed
    assert front.complete([1] * 15, SamplingParams(max_tokens=5)).params.max_tokens == 5
    with pytest.raises(DoesNotFit, match=r"window is 20 tokens.* prompt has 15 and max_tokens asks for 6 more: 21") as caught:
        front.complete([1] * 15, SamplingParams(max_tokens=6))
    assert (caught.value.param, caught.value.code, caught.value.status) == ("max_tokens", "context_length_exceeded", 400)
    with pytest.raises(DoesNotFit, match=r"prompt has 20 tokens.*window of 20") as caught:
        front.complete([1] * 20, SamplingParams())
    assert caught.value.param == "prompt"
    with pytest.raises(DoesNotFit) as caught:
        front.chat(say("x" * 30), SamplingParams())
    assert caught.value.param == "messages"


def test_the_engines_limits_are_adopted() -> None:
    front = make(window=200)
    front.adopt({"window": 64, "block_size": 8})
    request = front.complete([1] * 20, SamplingParams())
    assert (request.params.max_tokens, len(request.hashes)) == (44, 2)
    front.adopt({"window": 500, "block_size": 8})
    assert front.window == 64


def test_stop_ids() -> None:
    front = make()
    assert front.complete("a", SamplingParams(stop_token_ids=[5])).stop_ids == {5, EOS, EOT}
    assert front.complete("a", SamplingParams(ignore_eos=True, stop_token_ids=[5])).stop_ids == {5}
    assert front.complete("a", SamplingParams(ignore_eos=True)).stop_ids == frozenset()


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([1, 259], {}, "prompt[1]"),
        ([-1], {}, "prompt[0]"),
        ([True], {}, "prompt[0]"),
        ([1, "a"], {}, "prompt[1]"),
        ([], {}, "prompt"),
        ("\ud800", {}, "prompt"),
        ("a", {"stop_token_ids": [3, 259]}, "stop_token_ids[1]"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, params: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        make().complete(prompt, SamplingParams(**params))
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def test_an_empty_text_starts_at_bos() -> None:
    assert make().complete("", SamplingParams()).tokens == [BOS]


def test_a_conversation_has_one_bos() -> None:
    front = make()
    request = front.chat([{"role": "developer", "content": "Be brief."}, *say("Hi")], SamplingParams())
    assert request.tokens == [BOS, *b"[system] Be brief.\n[user] Hi\n[assistant] "]
    bare = make(TEMPLATE.replace("{{ bos_token }}", ""))
    assert bare.chat(say("Hi"), SamplingParams()).tokens == [BOS, *b"[user] Hi\n[assistant] "]


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    request = make().chat([{"role": "user", "content": parts, "refusal": None}], SamplingParams())
    assert request.tokens == make().chat(say("Hello"), SamplingParams()).tokens


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "at least one"),
        (["hi"], "messages[0]", "object"),
        ([*say("a"), {"role": "king", "content": "x"}], "messages[1].role", "system, developer, user, assistant,"),
        ([{"content": "x"}], "messages[0].role", "None"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "user", "content": None}], "messages[0].content", "missing"),
        ([{"role": "user", "content": 3}], "messages[0].content", "int"),
        ([{"role": "user", "content": "\udfff"}], "messages[0].content", "Unicode"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0]", "text"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text", "string"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "text"),
        ([{"role": "assistant", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls", "not supported"),
        (say("tools"), "messages", "no tools here"),
        ([{"role": "tool", "content": "x"}], "messages[0].role", "system, developer, user, assistant"),
    ],
)
def test_conversations_that_are_refused(messages: Any, param: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        make().chat(messages, SamplingParams())
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert "\n" not in str(caught.value)


def test_no_chat_template() -> None:
    with pytest.raises(BadRequest, match="no chat template") as caught:
        make(None).chat(say("a"), SamplingParams())
    assert caught.value.param == "messages"


def stream(**params: Any) -> TextStream:
    front = make()
    return front.stream(front.complete("x", SamplingParams(**params)))


def out(text: str | list[int], finish: FinishReason | None = None, **more: Any) -> Output:
    return Output(0, list(text.encode()) if isinstance(text, str) else text, finish_reason=finish, **more)


def test_text_comes_whole_and_finish_once() -> None:
    answer = stream()
    heart = "♥".encode()
    deltas = [answer.push(out("a")), answer.push(out(list(heart[:2]))), answer.push(out(list(heart[2:])))]
    deltas.append(answer.push(out([heart[0]], FinishReason.LENGTH)))
    assert [d.text for d in deltas] == ["a", "", "♥", "\ufffd"]
    assert [d.finish_reason for d in deltas] == [None, None, None, FinishReason.LENGTH]
    assert answer.finished
    assert answer.push(out("late", FinishReason.LENGTH)) == type(deltas[0])()


def test_a_stop_string_ends_it_at_the_token_that_completes_it() -> None:
    answer = stream(stop=["END", "zzz"])
    logprobs = [TokenLogprobs(-float(i), [], []) for i in range(8)]
    assert answer.push(out("ab E")).text == "ab "
    delta = answer.push(out("ND and", logprobs=logprobs[:6]))
    assert (delta.text, delta.token_ids, delta.logprobs) == ("", list(b"ND"), logprobs[:2])
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "END")
    assert answer.push(out("more")).token_ids == []


def test_a_stop_string_in_the_engines_last_output_is_what_ended_it() -> None:
    answer = stream(stop=["END"])
    delta = answer.push(out("xEND", FinishReason.LENGTH))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("x", FinishReason.STOP, "END")


def test_a_stop_string_that_never_came_is_shown() -> None:
    answer = stream(stop=["END"])
    assert answer.push(out("xEN")).text == "x"
    delta = answer.push(out([EOS], FinishReason.STOP))
    assert (delta.text, delta.token_ids) == ("EN", [EOS])
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, None)


def test_the_id_that_ends_it_is_counted_and_not_shown() -> None:
    answer = stream(stop_token_ids=[ord("c")])
    delta = answer.push(out("abc", FinishReason.STOP, stop_reason=ord("c")))
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("ab", list(b"abc"), ord("c"))
    answer = stream(stop=["c"], stop_token_ids=[ord("c")])  # nor does it complete a stop string: the id came first
    delta = answer.push(out("abc", FinishReason.STOP, stop_reason=ord("c")))
    assert (delta.text, delta.stop_reason) == ("ab", ord("c"))


def test_an_error_is_raised() -> None:
    with pytest.raises(CutawayError, match="not finite"):
        stream().push(out("", FinishReason.ERROR, error="the logits were not finite"))


def test_another_detokenizer_is_used(tmp_path: Path) -> None:
    part = tmp_path / "loud.py"
    part.write_text(
        "from cutaway.text.detokenizer import Detokenizer as Own\n"
        "class Detokenizer(Own):\n    def push(self, ids): return super().push(ids).upper()\n"
    )
    front = make(parts=Parts({"detokenizer": str(part)}))
    assert front.stream(front.complete("x", SamplingParams())).push(out("abc")).text == "ABC"


@pytest.mark.model
def test_the_built_in_model_is_opened_without_its_weights() -> None:
    front = Front.open(EngineConfig(max_model_len=100), Parts())
    assert (front.model_name, front.window, front.tokenizer.vocab_size) == ("smollm2-135m-instruct", 100, 49152)
    request = front.chat(say("Hi"), SamplingParams())
    assert request.tokens.count(1) == 3  # <|im_start|> opens each message, and is BOS as well: one a message
    assert request.stop_ids == {2}
    with pytest.raises(CutawayError, match="2 to 8192"):
        Front.open(EngineConfig(max_model_len=9000), Parts())


def test_a_model_is_named_after_its_file_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", "llama")
    tiny.write_folder(tmp_path / "Tiny-3.2-1B", "llama")
    for model in ("tiny.gguf", "Tiny-3.2-1B", "."):
        monkeypatch.chdir(tmp_path / "Tiny-3.2-1B" if model == "." else tmp_path)
        front = Front.open(EngineConfig(model=model), Parts())
        assert front.model_name == ("tiny" if model == "tiny.gguf" else "Tiny-3.2-1B")
        assert (front.window, front.eos_ids) == (512, {2} if model == "tiny.gguf" else {0, 2})
