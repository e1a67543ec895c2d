"""`LLM`: the engine in this process, for scripts and notebooks. The same requests as through the server, the same ids.

>>> from cutaway import LLM, SamplingParams
>>> with LLM() as llm:                                                      # doctest: +SKIP
...     for answer in llm.generate(["Hello", "The sky is"], SamplingParams(max_tokens=8, temperature=0)):
...         print(answer.text)
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from cutaway.core.errors import CutawayError
from cutaway.core.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from cutaway.engine.config import EngineConfig
from cutaway.engine.front import Delta, Front, TextStream
from cutaway.engine.process import build
from cutaway.engine.shadow import parts_of

Prompt = str | Sequence[int]
Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Completion:
    """One answer. `token_ids` are those counted: without what came after a stop string, with the id that ended it.

    stop_reason: the stop string, or the id of `stop_token_ids`, that ended it. logprobs: one a token id, if asked for.
    num_cached: prompt tokens that were taken from the prefix cache.
    """

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached: int = 0

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class LLM:
    """A model that is ready to answer. `settings` are the fields of `EngineConfig`; for one thread at a time.

    Raises CheckpointError for a model that cannot be read, CutawayError for a setting that does not exist.
    """

    def __init__(self, model: str = EngineConfig().model, **settings: Any) -> None:
        known = [f.name for f in fields(EngineConfig)]
        for name in settings:
            if name not in known:
                raise CutawayError(f"{name} is not a setting of LLM; known: {', '.join(known)}")
        self.config = EngineConfig(model=model, **settings)
        self.parts = parts_of(self.config)
        self.front = Front.open(self.config, self.parts)
        self.engine, self.info = build(self.config, self.parts)
        self.front.adopt(self.info)
        self._inboxes: dict[int, list[Output]] = {}  # outputs of open requests, until their stream takes them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is running and gives the memory back."""
        if self.__dict__.pop("engine", None) is not None:
            gc.collect()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answers to prompts (text, or token ids), in their order, all run together.

        One `params` serves all, a list has one each. Raises BadRequest before anything runs.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        asked: Any = [prompts] if one else prompts
        return self._run([self.front.complete(p, s) for p, s in zip(asked, _each(params, len(asked)), strict=True)])

    def chat(
        self, messages: Messages | Sequence[Messages], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answers to one conversation, or to each of a list of them."""
        asked: Any = [messages] if not messages or isinstance(messages[0], dict) else messages
        return self._run([self.front.chat(m, s) for m, s in zip(asked, _each(params, len(asked)), strict=True)])

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Iterator[Delta]:
        """One answer as it comes, to a prompt or (a list of dicts) a conversation. Closing the iterator ends it.

        Raises BadRequest here and not at the first delta.
        """
        settings = params or SamplingParams()
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        make: Any = self.front.chat if is_chat else self.front.complete
        return self._deltas(make(prompt, settings))

    def _deltas(self, request: Request) -> Iterator[Delta]:
        stream = self.front.stream(request)
        self._add(request)
        try:
            while not stream.finished:
                for output in self._take(request):
                    yield stream.push(output)
                if not stream.finished:
                    self._step()
        finally:
            self._drop([request])

    def _run(self, requests: list[Request]) -> list[Completion]:
        open_: dict[int, tuple[Request, TextStream, Completion]] = {}
        answers = [Completion(request.tokens[:]) for request in requests]
        try:
            for request, answer in zip(requests, answers, strict=True):
                self._add(request)
                open_[request.id] = request, self.front.stream(request), answer
            while open_:
                self._step()
                for request, stream, answer in list(open_.values()):
                    for output in self._take(request):
                        answer.add(stream.push(output))
                        answer.num_cached = max(answer.num_cached, output.num_cached)
                        if stream.finished:
                            self._drop([request])
                            del open_[request.id]
                            break
        finally:
            self._drop([request for request, _, _ in open_.values()])
        return answers

    def _add(self, request: Request) -> None:
        self.engine.add(request)
        self._inboxes[request.id] = []

    def _take(self, request: Request) -> list[Output]:
        outputs, self._inboxes[request.id] = self._inboxes[request.id], []
        return outputs

    def _step(self) -> None:
        for output in self.engine.step():
            if output.id in self._inboxes:
                self._inboxes[output.id].append(output)

    def _drop(self, requests: Sequence[Request]) -> None:
        """Forgets requests; the engine ends those that it still runs."""
        for request in requests:
            self._inboxes.pop(request.id, None)
        self.engine.abort([request.id for request in requests])


def _each(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if len(params) != n:
        raise CutawayError(f"{n} prompts need one SamplingParams or {n} of them, got {len(params)}")
    return list(params)
