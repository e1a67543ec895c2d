"""`generate` and `chat`: answers in the terminal, from the engine in this process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cutaway.core.errors import BadRequest, CutawayError
from cutaway.core.request import FinishReason, SamplingParams
from cutaway.engine.config import EngineConfig

if TYPE_CHECKING:
    from cutaway.engine.llm import LLM

Message = dict[str, Any]
MOST_TOKENS = 512  # of an answer, where --max-tokens does not say: a small model may never end by itself
CONTROLS = {
    i: "\ufffd" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"
}  # an answer must not steer the terminal

HELP = """\
/clear          forget the conversation
/system TEXT    how the model is to answer; forgets the conversation
/exit           leave, as Ctrl-D does
Ctrl-C stops an answer."""


@dataclass(slots=True)
class Answer:
    """One answer as it grows, and what it took. Seconds from when it was asked for."""

    text: str = ""
    num_tokens: int = 0
    first: float = 0.0
    seconds: float = 0.0
    ended: str = ""  # why, if it was not the model that ended it

    def summary(self) -> str:
        parts = [f"{self.num_tokens} tokens in {self.seconds:.2f} s", f"first after {self.first:.2f} s"]
        if self.num_tokens > 1 and self.seconds > self.first:
            parts.append(f"then {(self.num_tokens - 1) / (self.seconds - self.first):.1f} tokens/s")
        return ", ".join([*parts, self.ended] if self.ended else parts)


@contextmanager
def loaded(config: EngineConfig) -> Generator[LLM]:
    """The model, with a line on the terminal while it loads."""
    from rich.console import Console

    with Console(stderr=True).status(f"loading {config.model}"):
        from cutaway.engine.llm import LLM
        from cutaway.engine.parts import PARTS

        llm = LLM(**{name: getattr(config, name) for name in EngineConfig.__dataclass_fields__})
    with llm:
        if own := [f"{Path(file).name} ({PARTS[name].stage})" for name, file in llm.parts.overrides.items()]:
            print(f"with your {', '.join(own)}", file=sys.stderr)
        yield llm


def pieces(
    llm: LLM, prompt: str | list[Message], params: SamplingParams, answer: Answer, most: int | None, stopped: Callable[[], bool]
) -> Generator[str]:
    """The text of one answer as it comes, counted in `answer`. Raises BadRequest before the first piece."""
    begun = time.monotonic()
    limit = most or MOST_TOKENS
    deltas = llm.stream(prompt, params)
    for delta in deltas:
        answer.seconds = time.monotonic() - begun
        answer.first = answer.first or answer.seconds
        answer.num_tokens += len(delta.token_ids)
        answer.text += delta.text
        yield delta.text
        if delta.finish_reason is FinishReason.LENGTH:
            answer.ended = "cut: the window is full"
        elif delta.finish_reason is None and stopped():
            answer.ended = "stopped"
        elif delta.finish_reason is None and answer.num_tokens >= limit:
            answer.ended = f"cut after {limit} tokens (--max-tokens)"
        if answer.ended or delta.finish_reason is not None:
            break


def generate(config: EngineConfig, prompt: str, params: SamplingParams, *, max_tokens: int | None, raw: bool) -> None:
    """One answer to standard output, its figures to standard error."""
    if prompt == "-":
        if sys.stdin.isatty():
            raise CutawayError('there is no prompt: generate "Why is the sky blue?", or one on standard input')
        prompt = sys.stdin.buffer.read().decode(errors="surrogateescape")
        if not prompt:
            raise CutawayError("standard input is empty: there is no prompt to answer")
    with loaded(config) as llm:
        asked: str | list[Message] = (
            prompt if raw or llm.front.template.source is None else [{"role": "user", "content": prompt}]
        )
        answer = Answer()
        for piece in pieces(llm, asked, params, answer, max_tokens, lambda: False):
            show(piece)
        show("\n")
    print(answer.summary(), file=sys.stderr)
    for name, part in llm.parts.report().items():
        if (shadow := part.get("shadow")) and shadow["difference"] is None:
            how = f"{shadow['calls']:,} calls, {shadow['compared']:,} of them compared: no difference"
            print(f"the shadow of {name} (stage {part['stage']}): {how}", file=sys.stderr)


def show(text: str) -> None:
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Interrupt:
    """Ctrl-C while an answer runs: remembered, not raised, so that no step of the engine is torn in the middle."""

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> Interrupt:
        self.came = False
        self._before = signal.signal(signal.SIGINT, self._arrived)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _arrived(self, _signal: int, _frame: FrameType | None) -> None:
        self.came = True


@dataclass(slots=True)
class Chat:
    """A conversation: what was said, and how the next answer is asked for."""

    llm: LLM
    params: SamplingParams
    max_tokens: int | None
    system: str | None
    said: list[Message] = field(default_factory=list[Message])

    def line(self, text: str) -> bool:
        """Does what a typed line asks; False to leave."""
        word, _, rest = text.strip().partition(" ")
        match word:
            case "":
                pass
            case "/exit" | "/quit":
                return False
            case "/clear":
                self.said.clear()
                print("The conversation is forgotten.")
            case "/system":
                self.system = rest.strip() or None
                self.said.clear()
                print(
                    "The conversation begins anew"
                    + (" with that system message." if self.system else ", without a system message.")
                )
            case "/help":
                print(HELP)
            case _ if word.startswith("/") and "/" not in word[1:]:
                print(f"There is no {word}.\n{HELP}")
            case _:
                self.ask(text)
        return True

    def ask(self, text: str) -> None:
        """Shows the answer as it comes. A stopped one stays in the conversation as far as it came."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": text}
        answer = Answer()
        with Interrupt() as interrupt:
            try:
                for piece in pieces(
                    self.llm, [*first, *self.said, asked], self.params, answer, self.max_tokens, lambda: interrupt.came
                ):
                    show(piece)
            except BadRequest as error:  # the conversation goes on; anything else ends it
                print(f"cutaway: {error}; /clear makes room", file=sys.stderr)
                return
        self.said += [asked, {"role": "assistant", "content": answer.text}]
        show("\n")
        if sys.stdout.isatty():
            dim, plain = ("", "") if os.environ.get("NO_COLOR") else ("\033[2m", "\033[0m")
            print(f"{dim}{answer.summary()}{plain}\n")


def chat(config: EngineConfig, params: SamplingParams, *, max_tokens: int | None, system: str | None) -> None:
    """Answers lines until they end. On a terminal with editing and a history that is kept; from a pipe, line by line."""
    with loaded(config) as llm:
        talk = Chat(llm, params, max_tokens, system)
        for line in typed_lines(f"{llm.front.model_name}. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the rest.\n"):
            if not talk.line(line):
                break


def typed_lines(greeting: str) -> Iterator[str]:
    if not sys.stdin.isatty():
        for raw in sys.stdin.buffer:
            yield raw.decode(errors="surrogateescape")
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    from cutaway.checkpoints.hub import models_folder

    path = models_folder().parent / "chat_history"
    history: History = InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        history = FileHistory(path)
    except OSError:
        pass  # a home that cannot be written to costs the history, not the chat
    session: PromptSession[str] = PromptSession(history=history)
    print(greeting)
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            continue  # the line is dropped, as in a shell
        except EOFError:
            return
