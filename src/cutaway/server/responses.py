"""What the API answers, byte for byte: completions, chunks of a stream, usage, logprobs.

A chunk is put together from bytes that are the same for the whole stream and the JSON of what is new; per token there
is no object to validate and no dict to walk.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from cutaway.core.request import FinishReason, Request, TokenLogprobs

Kind = Literal["chat", "text"]
Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI sends this for a probability of nought

encode = msgspec.json.encode


class TokenTexts(Protocol):
    """What logprobs need of a tokenizer."""

    def token_bytes(self, id: int) -> bytes: ...
    def token_text(self, id: int) -> str: ...


class DeltaLike(Protocol):
    """What one step added to a choice (`engine.front.Delta`). logprobs are aligned with token_ids."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(slots=True)
class Usage:
    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def usage_of(choices: Sequence[Choice]) -> Usage:
    """One request's usage: the sum over its choices."""
    prompt = sum(c.request.num_prompt for c in choices)
    return Usage(prompt, sum(c.completion_tokens for c in choices), sum(c.cached_tokens for c in choices))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else MIN_LOGPROB


@dataclass(slots=True)
class Choice:
    """One choice as it grows: counts, and for an answer in one piece its text and logprobs."""

    index: int
    request: Request
    kind: Kind
    tokenizer: TokenTexts
    completion_tokens: int = 0
    cached_tokens: int = 0
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[Json] = field(default_factory=list[Json])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    _offset: int = 0  # characters of the answer before the next token
    _decode: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def take(self, delta: DeltaLike) -> Json | None:
        """Counts what came; answers its logprobs in the shape of the endpoint, None where none were asked."""
        self.completion_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self.request.params.logprobs is None:
            return None
        return self._chat(delta) if self.kind == "chat" else self._text(delta)

    def keep(self, delta: DeltaLike) -> None:
        """`take` for an answer in one piece."""
        shape = self.take(delta)
        if delta.text:
            self.texts.append(delta.text)
        if shape is not None:
            self.logprobs.append(shape)

    def _token(self, id: int, logprob: float) -> Json:
        raw = self.tokenizer.token_bytes(id)
        return {"token": self.tokenizer.token_text(id), "logprob": _finite(logprob), "bytes": list(raw)}

    def _chat(self, delta: DeltaLike) -> Json:
        content: list[Json] = []
        for id, lp in zip(delta.token_ids, delta.logprobs or (), strict=False):
            top = [self._token(i, v) for i, v in zip(lp.top_ids, lp.top, strict=True)]
            content.append({**self._token(id, lp.chosen), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _text(self, delta: DeltaLike) -> Json:
        """OpenAI's older shape. text_offset counts characters of the answer before each token."""
        shape: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        text = self.tokenizer.token_text
        for id, lp in zip(delta.token_ids, delta.logprobs or (), strict=False):
            top = {text(i): _finite(v) for i, v in zip(reversed(lp.top_ids), reversed(lp.top), strict=True)}
            shape["tokens"].append(text(id))
            shape["token_logprobs"].append(_finite(lp.chosen))
            shape["top_logprobs"].append(dict(reversed(top.items())))  # a text that two ids share keeps the likelier one
            shape["text_offset"].append(self._offset)
            self._offset += len(self._decode.decode(self.tokenizer.token_bytes(id)))
        return shape

    def json(self) -> Json:
        """This choice of an answer in one piece."""
        text = "".join(self.texts)
        body: Json = {"message": {"role": "assistant", "content": text}} if self.kind == "chat" else {"text": text}
        return {
            "index": self.index,
            **body,
            "logprobs": self._merged(),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }

    def _merged(self) -> Json | None:
        if self.request.params.logprobs is None:
            return None
        merged: Json = {"content": [], "refusal": None} if self.kind == "chat" else {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for shape in self.logprobs:
            for name, values in shape.items():
                if values is not None:
                    merged[name].extend(values)
        return merged


@dataclass(slots=True)
class Head:
    """What every object of one answer begins with."""

    kind: Kind
    id: str
    created: int
    model: str
    fingerprint: str

    def json(self, chunk: bool = False) -> Json:
        names = {"chat": ("chat.completion", "chat.completion.chunk"), "text": ("text_completion", "text_completion")}
        return {
            "id": self.id,
            "object": names[self.kind][chunk],
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def answer(self, choices: Sequence[Choice]) -> bytes:
        """The whole of an answer that is not streamed."""
        return encode({**self.json(), "choices": [c.json() for c in choices], "usage": usage_of(choices).json()})


class Chunks:
    """The events of one stream.

    With include_usage every chunk carries `usage: null` and a last one with no choices carries the counts (OpenAI);
    without it there is no such key.
    """

    def __init__(self, head: Head, include_usage: bool):
        self._chat = head.kind == "chat"
        self._include_usage = include_usage
        self._start = b"data: " + encode(head.json(chunk=True))[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def first(self, index: int) -> bytes:
        """A chat's first event: the role, and content that is not null. A completion has none."""
        return self._choice(index, b'{"role":"assistant","content":""}', None, None, None) if self._chat else b""

    def delta(self, index: int, delta: DeltaLike, logprobs: Json | None) -> bytes:
        """The event of one step; b"" where there is nothing to tell (text held back, no logprobs, no end)."""
        if not delta.text and delta.finish_reason is None and not (logprobs and delta.token_ids):
            return b""
        body = encode(delta.text)
        if self._chat:
            body = b'{"content":' + body + b"}" if delta.text or logprobs else b"{}"
        return self._choice(index, body, logprobs, delta.finish_reason, delta.stop_reason)

    def _choice(
        self, index: int, body: bytes, logprobs: Json | None, finish: FinishReason | None, stop: str | int | None
    ) -> bytes:
        if finish is None:
            end = b',"finish_reason":null}'
        else:
            end = b',"finish_reason":%b,"stop_reason":%b}' % (encode(finish), encode(stop))
        return b"".join((
            self._start, b'{"index":%d,' % index, b'"delta":' if self._chat else b'"text":', body,
            b',"logprobs":', b"null" if logprobs is None else encode(logprobs),
            end, self._end,
        ))  # fmt: skip

    def last(self, usage: Usage) -> bytes:
        """What ends a stream: the usage where it was asked for, and [DONE]."""
        if not self._include_usage:
            return DONE
        return self._start + b'],"usage":' + encode(usage.json()) + b"}\n\n" + DONE


def error_event(body: Json) -> bytes:
    """A fault after the stream has begun."""
    return b"data: " + encode(body) + b"\n\n"
