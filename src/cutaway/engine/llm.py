"""`LLM`: the engine in this process, for scripts and notebooks. The same requests as through the server, the same ids.

>>> from cutaway import LLM, SamplingParams
>>> with LLM() as llm:                                                      # doctest: +SKIP
...     for answer in llm.generate(["Hello", "The sky is"], SamplingParams(max_tokens=8, temperature=0)):
...         print(answer.text)
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

from cutaway.core.errors import BadRequest, CutawayError
from cutaway.core.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from cutaway.engine.config import EngineConfig
from cutaway.engine.faults import Watch, find
from cutaway.engine.front import Delta, Front, TextStream
from cutaway.engine.parts import PartFault
from cutaway.engine.process import build
from cutaway.engine.shadow import parts_of

T = TypeVar("T")
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


@dataclass(slots=True)
class _Open:
    """A request that has not ended, with what no part has a hand on: its prompt and all that came of it, in order."""

    request: Request
    stream: TextStream
    tokens: list[int]  # the prompt, and the answer as far as the engine has given it
    inbox: list[Output] = field(default_factory=list[Output])  # outputs that its stream has not taken
    pushed: list[int] = field(default_factory=list[int])  # ids that it has
    text: str = ""
    ended: bool = False  # its last output has come
    stale: bool = False  # its stream's detokenizer has been left
    skip: int = 0  # characters that its stream is behind what was shown


def _never_came_back(fault: PartFault) -> None:
    """Nothing can end a loop in another thread but the end of the process."""
    line = f"\ncutaway: {fault}; the engine's own part runs with --reference, or without --part\n"
    os.write(2, ("\033[?25h" if os.isatty(2) else "").encode() + line.encode())  # what hid the cursor cannot show it again
    os._exit(1)


class LLM:
    """A model that is ready to answer. `settings` are the fields of `EngineConfig`; for one thread at a time.

    A part of yours that raises, or answers what nobody can use, is said in one line on standard error and left: the engine's
    own goes on where it stopped, and what was given stays. One that never comes back ends the process with that line.

    Raises CheckpointError for a model that cannot be read, CutawayError for a setting that does not exist.
    """

    def __init__(self, model: str = EngineConfig().model, **settings: Any) -> None:
        known = [f.name for f in fields(EngineConfig)]
        for name in settings:
            if name not in known:
                raise CutawayError(f"{name} is not a setting of LLM; known: {', '.join(known)}")
        self.config = EngineConfig(model=model, **settings)
        self.parts = parts_of(self.config)
        self._open: dict[int, _Open] = {}
        self._watch = Watch(self.parts, _never_came_back)
        try:
            self.front = Front.open(self.config, self.parts)
            self._build()
        except BaseException:
            self._watch.stop()
            raise
        self.front.adopt(self.info)

    @property
    def dropped(self) -> dict[str, str]:
        """Parts that were at fault, and how."""
        return self.parts.dropped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is running and gives the memory back."""
        self._watch.stop()
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
        open_ = self._add(request)
        try:
            while not open_.stream.finished:
                yield from self._take(open_)
                if not open_.stream.finished:
                    self._step()
        finally:
            self._drop([request])

    def _run(self, requests: list[Request]) -> list[Completion]:
        answers = {request.id: Completion(request.tokens[:]) for request in requests}
        try:
            running = [self._add(request) for request in requests]
            while running:
                self._step()
                for open_ in running:
                    answer = answers[open_.request.id]
                    for output in open_.inbox:
                        answer.num_cached = max(answer.num_cached, output.num_cached)
                    for delta in self._take(open_):
                        answer.add(delta)
                    if open_.stream.finished:
                        self._drop([open_.request])
                running = [open_ for open_ in running if not open_.stream.finished]
        finally:
            self._drop(requests)
        return list(answers.values())

    def _add(self, request: Request) -> _Open:
        open_ = _Open(request, self._stream(request), request.tokens[:])
        fault = self._try(lambda: self.engine.add(request))
        self._open[request.id] = open_
        if fault:
            self._mend(fault)
        return open_

    def _take(self, open_: _Open) -> Iterator[Delta]:
        """What came for a request and is not taken yet."""
        outputs, open_.inbox = open_.inbox, []
        for output in outputs:
            if not open_.stream.finished:
                yield self._push(open_, output)

    def _step(self) -> None:
        outputs = self._try(self.engine.step)
        if isinstance(outputs, PartFault):
            return self._mend(outputs)
        for output in outputs:
            if open_ := self._open.get(output.id):
                open_.inbox.append(output)
                open_.tokens += output.token_ids
                open_.ended = output.finish_reason is not None or output.error is not None

    def _drop(self, requests: Sequence[Request]) -> None:
        """Forgets requests; the engine ends those that it still runs."""
        for request in requests:
            self._open.pop(request.id, None)
        if "engine" in self.__dict__ and (fault := self._try(lambda: self.engine.abort([r.id for r in requests]))):
            self._mend(fault)

    # ---- parts that are at fault ----

    def _try(self, work: Callable[[], T]) -> T | PartFault:
        """Something that parts have a hand in. What is not their fault is raised, a file that cannot be loaded as well.

        Answers a fault, for the traceback of a raised one would keep the engine's memory."""
        self._watch.begin()
        try:
            return work()
        except (Exception, SystemExit) as error:
            fault = None if isinstance(error, BadRequest) else find(self.parts, error)
            if fault is None or fault is error:
                raise
            return fault
        finally:
            self._watch.idle()

    def _leave(self, fault: PartFault) -> None:
        """The engine's own parts play from now on in the place of those at fault."""
        lead = "\n" if sys.stderr.isatty() else ""  # a terminal may be in the middle of the answer's line
        print(f"{lead}cutaway: {fault}; the engine's own {' and '.join(fault.parts)} goes on", file=sys.stderr, flush=True)
        for open_ in self._open.values():
            open_.stale |= "detokenizer" in fault.parts
        self.parts.leave(fault)

    def _build(self) -> None:
        """The engine, without the parts that fail while it is made."""
        while True:
            trace = self.config.trace and f"{self.config.trace}.{len(self.dropped)}" if self.dropped else self.config.trace
            config = replace(self.config, parts=dict(self.parts.overrides), trace=trace)
            made = self._try(lambda: build(config, self.parts))  # noqa: B023
            if not isinstance(made, PartFault):
                self.engine, self.info = made
                return
            self._leave(made)

    def _mend(self, fault: PartFault) -> None:
        """A new engine goes on with what is open: each request comes back as one that was preempted, with its tokens."""
        self._leave(fault)
        del self.engine
        gc.collect()
        self._build()
        for open_ in self._open.values():
            asked = open_.request
            again = Request(asked.id, open_.tokens[:], asked.params, asked.stop_ids, num_prompt=asked.num_prompt)
            if not open_.ended and (another := self._try(lambda: self.engine.add(again))):  # noqa: B023
                return self._mend(another)

    def _stream(self, request: Request) -> TextStream:
        stream = self._try(lambda: self.front.stream(request))
        if isinstance(stream, PartFault):
            self._leave(stream)
            return self.front.stream(request)
        return stream

    def _push(self, open_: _Open, output: Output) -> Delta:
        delta = None if open_.stale else self._try(lambda: open_.stream.push(output))
        if isinstance(delta, PartFault):
            self._leave(delta)
        if delta is None or isinstance(delta, PartFault):
            delta = self._push_again(open_, output)
        if open_.skip:
            delta.text, open_.skip = delta.text[open_.skip :], max(open_.skip - len(delta.text), 0)
        open_.text += delta.text
        open_.pushed += output.token_ids
        return delta

    def _push_again(self, open_: _Open, output: Output) -> Delta:
        """Another detokenizer reads the whole answer; what was shown already is skipped."""
        open_.stream, open_.stale, open_.skip = self._stream(open_.request), False, len(open_.text)
        before = open_.stream.push(Output(output.id, open_.pushed))
        if open_.stream.finished:
            return before
        delta = open_.stream.push(output)
        return replace(delta, text=before.text + delta.text)


def _each(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if len(params) != n:
        raise CutawayError(f"{n} prompts need one SamplingParams or {n} of them, got {len(params)}")
    return list(params)
