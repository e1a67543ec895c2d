"""All that happens to a request outside the engine: template, ids, limits, hash chain; and its answer's way back to text.

`LLM` and the server go through here alike, which is why both give the same ids. Nothing here imports a tensor library.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from cutaway.checkpoints import open_checkpoint, resolve
from cutaway.core.errors import BadRequest, CutawayError, DoesNotFit, shown
from cutaway.core.plan import Limits
from cutaway.core.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from cutaway.engine.config import EngineConfig
from cutaway.engine.parts import DetokenizerLike, Parts
from cutaway.text.chat import ChatTemplate
from cutaway.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant")
MESSAGE_FIELDS = ("role", "content")


@dataclass(slots=True)
class Delta:
    """What one output adds to an answer. token_ids are counted, and logprobs stand for them one by one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class TextStream:
    """One request's outputs as text.

    A stop string ends the answer at the token that completes it: ids past it are dropped and not counted. The id that
    ended an answer is counted, its text is not shown. `finish_reason` is set on one delta; later ones are empty.
    """

    def __init__(self, detokenizer: DetokenizerLike, stops: bool) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self.finished = False

    def push(self, output: Output) -> Delta:
        """Raises CutawayError when the engine failed the request."""
        if output.error is not None:
            raise CutawayError(output.error)
        if self.finished:
            return Delta()
        delta = Delta(token_ids=output.token_ids, logprobs=output.logprobs)
        shown = output.token_ids[:-1] if output.finish_reason is FinishReason.STOP else output.token_ids
        # One by one only where it matters which token completed a stop string.
        for end, ids in enumerate([[id] for id in shown] if self._stops else [shown], start=1):
            delta.text += self._detokenizer.push(ids)
            if self._detokenizer.stopped:
                return self._stopped(delta, end)
        if output.finish_reason is not None:
            delta.text += self._detokenizer.finish()
            if self._detokenizer.stopped:
                return self._stopped(delta, len(shown))
            delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
            self.finished = True
        return delta

    def _stopped(self, delta: Delta, num_tokens: int) -> Delta:
        delta.token_ids = delta.token_ids[:num_tokens]
        delta.logprobs = delta.logprobs and delta.logprobs[:num_tokens]
        delta.finish_reason, delta.stop_reason = FinishReason.STOP, self._detokenizer.stop_reason
        self.finished = True
        return delta


class Front:
    """Makes requests. `window` and `block_size` are the model's until `adopt` brings the running engine's.

    Example:
        >>> front = Front.open(EngineConfig(), Parts())                       # doctest: +SKIP
        >>> request = front.complete("The capital of France is", SamplingParams(max_tokens=5))   # doctest: +SKIP
    """

    def __init__(
        self, name: str, tokenizer: Tokenizer, template: ChatTemplate, eos_ids: frozenset[int], window: int, parts: Parts
    ) -> None:
        self.model_name = name
        self.tokenizer = tokenizer
        self.template = template
        self.eos_ids = eos_ids
        self.window = window
        self.block_size = Limits().block_size
        self.parts = parts
        self._ids = itertools.count()

    @classmethod
    def open(cls, config: EngineConfig, parts: Parts) -> Front:
        """Reads the model's header and tokenizer, no weights. Raises CheckpointError."""
        parts.load("front")
        checkpoint = open_checkpoint(resolve(config.model), config.load_format)
        assets = checkpoint.text()
        tokenizer = Tokenizer.open(assets)
        template = ChatTemplate.open(assets)
        most = checkpoint.config.max_position
        window = config.max_model_len or most
        if not 1 < window <= most:
            raise CutawayError(f"max_model_len must be 2 to {most}, which is the model's own window, got {window}")
        path = Path(config.model).expanduser()
        name = path.absolute().name.removesuffix(".gguf") if path.exists() else config.model
        eos_ids = checkpoint.generation.eos_ids | tokenizer.eos_ids
        return cls(name, tokenizer, template, eos_ids, window, parts)

    def adopt(self, info: Mapping[str, Any]) -> None:
        """Takes the engine's own limits (`channel.ready`): a small pool holds less than the model's window."""
        self.window = min(self.window, info["window"])
        self.block_size = info["block_size"]

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> Request:
        """A request from a conversation. Raises BadRequest that names the message at fault."""
        if not messages:
            raise BadRequest("messages must hold at least one message", param="messages")
        text = self.template.render([_message(m, f"messages[{i}]") for i, m in enumerate(messages)])
        return self._request(self.tokenizer.encode_rendered(self._short(text, "messages")), params, "messages")

    def complete(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """A request from text, or from token ids that are taken as they are. Raises BadRequest."""
        if isinstance(prompt, str):
            return self._request(self.tokenizer.encode(self._short(_text(prompt, "prompt"), "prompt")), params, "prompt")
        return self._request(self._checked(prompt, "prompt"), params, "prompt")

    def stream(self, request: Request) -> TextStream:
        """The text of a request's answer."""
        part = self.parts.get("detokenizer")
        stop = request.params.stop
        return TextStream(part.Detokenizer(self.tokenizer, request.tokens[: request.num_prompt], stop), bool(stop))

    def _request(self, ids: list[int], params: SamplingParams, source: str) -> Request:
        if not ids:
            raise BadRequest(f"{source} holds no token: there is nothing to go on from", param=source)
        self._checked(params.stop_token_ids, "stop_token_ids")
        params = replace(params, max_tokens=self._max_tokens(len(ids), params.max_tokens, source))
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        hashes: list[bytes] = []
        if "prefix_cache" not in self.parts.overrides:  # somebody's chain runs where its faults are dealt with: in the engine
            hashes = self.parts.get("prefix_cache").chain(ids, self.block_size)
        return Request(next(self._ids), ids, params, stop_ids, hashes)

    def _max_tokens(self, prompt: int, asked: int | None, source: str) -> int:
        if prompt >= self.window:
            raise DoesNotFit(
                f"the prompt has {prompt} tokens, which leaves no room for an answer in the window of {self.window}",
                param=source,
            )
        if asked is not None and prompt + asked > self.window:
            raise DoesNotFit(
                f"the window is {self.window} tokens, but the prompt has {prompt} and max_tokens asks for {asked} more:"
                f" {prompt + asked} in all; ask for at most {self.window - prompt}",
                param="max_tokens",
            )
        return self.window - prompt if asked is None else asked

    def _short(self, text: str, param: str) -> str:
        """Refuses what cannot fit whatever its tokens are: encoding megabytes only to count them takes seconds."""
        if len(text) < self.window:  # not to be refused here, however long the longest token is
            return text
        least = len(text) // self.tokenizer.longest
        if least >= self.window:
            raise DoesNotFit(
                f"the prompt has {len(text):,} characters, at least {least} tokens; the window is {self.window}", param=param
            )
        return text

    def _checked(self, ids: Sequence[int], param: str) -> list[int]:
        size = self.tokenizer.vocab_size
        for i, id in enumerate(ids):
            if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < size:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise BadRequest(
                    f"{param}[{i}] must be a token id from 0 to {size - 1}, got {shown(id)}", param=f"{param}[{i}]"
                )
        return list(ids)


def _message(message: object, path: str) -> dict[str, Any]:
    """One message as templates expect it: a role and one string. Fields that are null say nothing and are left out."""
    if not isinstance(message, Mapping):
        raise BadRequest(f"{path} must be an object with role and content, got {type(message).__name__}", param=path)
    given = {str(k): v for k, v in cast("Mapping[Any, Any]", message).items() if v is not None}
    for key in given:
        if key not in MESSAGE_FIELDS:
            named = f"{path}.{shown(key)[1:-1]}"
            raise BadRequest(f"{named} is not supported; a message has {', '.join(MESSAGE_FIELDS)}", param=named)
    role = given.get("role")
    if role not in ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}, got {shown(role)}", param=f"{path}.role")
    given["role"] = "system" if role == "developer" else role
    given["content"] = _content(given.get("content"), f"{path}.content")
    return given


def _content(content: object, path: str) -> str:
    """A string, or OpenAI's list of text parts joined."""
    if isinstance(content, str):
        return _text(content, path)
    if not isinstance(content, list):
        what = "is missing" if content is None else f"is of type {type(content).__name__}"
        raise BadRequest(f"{path} must be a string or a list of text parts; it {what}", param=path)
    texts: list[str] = []
    for i, part in enumerate(cast("list[Any]", content)):
        where = f"{path}[{i}]"
        if not isinstance(part, Mapping) or part.get("type") != "text" or set(part) != {"type", "text"}:
            raise BadRequest(f'{where} must be {{"type": "text", "text": "..."}}: this model reads text alone', param=where)
        if not isinstance(part["text"], str):
            raise BadRequest(f"{where}.text must be a string", param=f"{where}.text")
        texts.append(_text(part["text"], f"{where}.text"))
    return "".join(texts)


def _text(text: str, path: str) -> str:
    """JSON lets half of a surrogate pair through, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{path} is not valid Unicode: a lone surrogate at character {error.start}", param=path) from None
    return text
