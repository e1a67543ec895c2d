"""The bodies that the API takes, as types. What is not named here is refused, never ignored.

Three kinds of fields: those that the engine honours; those of OpenAI's that cannot change an answer (`user`, `metadata`,
`store`: false), taken without effect; all others, refused by name. `null` means absent for the fields taken; a refused
field is refused with null as well, because the clients leave out what they do not set. Types are strict: "0.7" is not a
number. Values are checked once, by `SamplingParams`, and messages once, by `Front`: `LLM` and the server have the same limits.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import from_json

from cutaway.core.errors import BadRequest
from cutaway.core.request import MAX_LOGPROBS, SamplingParams
from cutaway.engine.front import ROLES
from cutaway.server.errors import from_validation, shown

MAX_STOP = 16  # stop strings of one request (OpenAI takes 4)
MAX_PROMPTS = 128  # prompts of one /v1/completions body

# OpenAI's fields that are refused: named so that the message can tell them from a misspelling
LATER_CHAT = (
    "audio", "function_call", "functions", "logit_bias", "modalities", "moderation", "n",
    "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "response_format",
    "safety_identifier", "service_tier", "tool_choice", "tools", "verbosity", "web_search_options",
)  # fmt: skip
LATER_COMPLETION = ("best_of", "echo", "logit_bias", "n", "suffix")

Json = dict[str, Any]


def _bad(message: str, param: str, code: str = "invalid_value") -> BadRequest:
    return BadRequest(message, param=param, code=code)


class Invalid(ValueError, BadRequest):
    """A BadRequest that pydantic carries out of a validator (it takes ValueError alone)."""

    def __init__(self, message: str, *, param: str, code: str = "invalid_type"):
        BadRequest.__init__(self, message, param=param, code=code)


def _stop(value: object) -> object:
    strings: list[Any] = [value] if isinstance(value, str) else value if isinstance(value, list) else [None]
    if value is not None and not all(isinstance(s, str) and s for s in strings):
        raise Invalid(f"stop must be a non-empty string or a list of them, got {shown(value)}", param="stop")
    if value is not None and len(strings) > MAX_STOP:
        raise Invalid(f"stop may hold at most {MAX_STOP} strings, got {len(strings)}", param="stop", code="invalid_value")
    return None if value is None else strings


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(i) is int for i in value)


def _prompt(value: object) -> object:
    """One prompt or several: a string, a list of strings, a list of token ids, a list of lists of token ids."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    many: list[Any] = value if isinstance(value, list) else []
    if not many or not (all(isinstance(p, str) for p in many) or all(_is_ids(p) for p in many)):
        raise Invalid(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids, "
            f"none of the lists empty; got {shown(value)}",
            param="prompt",
        )
    if len(many) > MAX_PROMPTS:
        raise Invalid(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(many)}", param="prompt", code="invalid_value")
    return many


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Strict):
    include_usage: bool | None = None


# What `Front.chat` takes, for /openapi.json: it checks messages itself, because `LLM.chat` takes the same.
_MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"type": "string", "enum": list(ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        },
    },
}


_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string", "minLength": 1}},
        _IDS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS_SCHEMA},
    ]
}


class Body(Strict):
    """What both endpoints take."""

    model: str
    max_tokens: int | None = Field(None, description="Most tokens to generate; the prompt and they must fit the window.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="0 is greedy; to 100, default 1.")
    top_p: float | None = Field(None, description="Over 0, at most 1.")
    top_k: int | None = Field(None, description="Keep the k most likely tokens; 0 or -1 keeps all.")
    min_p: float | None = Field(None, description="Drop tokens below min_p times the most likely one's probability.")
    presence_penalty: float | None = Field(None, description="-2 to 2, once for each token of the answer so far.")
    frequency_penalty: float | None = Field(None, description="-2 to 2, times the count in the answer so far.")
    repetition_penalty: float | None = Field(None, description="Over 0; 1 is none; over prompt and answer.")
    seed: int | None = Field(None, description="The same seed draws the same, whatever runs beside it.")
    stop: Annotated[str | list[str] | None, BeforeValidator(_stop)] = Field(None, description=f"At most {MAX_STOP} strings.")
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """What no type says. Raises BadRequest."""
        if self.store:
            raise _bad("store must be false: this server keeps no completions", "store")
        if self.stream_options is not None and not self.stream:
            raise _bad("stream_options is only allowed with stream: true", "stream_options")

    def _params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        names = (
            "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "seed", "stop", "stop_token_ids", "ignore_eos",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs)


class ChatBody(Body):
    """POST /v1/chat/completions"""

    messages: Annotated[list[dict[str, Any]], WithJsonSchema(_MESSAGES_SCHEMA)]
    max_completion_tokens: int | None = Field(None, description="OpenAI's newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description=f"0 to {MAX_LOGPROBS}; needs logprobs: true.")

    def check(self) -> None:
        Body.check(self)
        if self.top_logprobs is not None and not self.logprobs:
            raise _bad("top_logprobs needs logprobs: true", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise _bad(f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}", "top_logprobs")
        one, other = self.max_tokens, self.max_completion_tokens
        if one is not None and other is not None and one != other:
            raise _bad(f"max_tokens ({one}) and max_completion_tokens ({other}) differ: give one", "max_completion_tokens")

    def params(self) -> SamplingParams:
        newer = self.max_completion_tokens
        if newer is not None and newer < 1:
            raise _bad(f"max_completion_tokens must be an integer of at least 1, got {newer}", "max_completion_tokens")
        return self._params(self.max_tokens if newer is None else newer, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionBody(Body):
    """POST /v1/completions. Several prompts give several choices, in their order."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: int | None = Field(None, description=f"0 to {MAX_LOGPROBS} most likely tokens beside each chosen one.")

    def params(self) -> SamplingParams:
        return self._params(16 if self.max_tokens is None else self.max_tokens, self.logprobs)


B = TypeVar("B", ChatBody, CompletionBody)


def parse(raw: bytes, kind: type[B]) -> B:
    """A body from its bytes; raises BadRequest in one line."""
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        later = LATER_CHAT if kind is ChatBody else LATER_COMPLETION
        raise from_validation(error, tuple(kind.model_fields), later) from None
    body.check()
    return body
