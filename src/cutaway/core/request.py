"""What is asked (`SamplingParams`, `Request`) and what comes back (`Output`): the nouns that every room shares."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cutaway.core.errors import BadRequest, DoesNotFit, shown

__all__ = ["BadRequest", "DoesNotFit", "FinishReason", "Output", "Request", "SamplingParams", "Table", "TokenLogprobs"]

MAX_LOGPROBS = 20  # OpenAI's limit on top_logprobs
MAX_COUNT = 2**31 - 1  # of tokens; what a device's integers hold


class FinishReason(StrEnum):
    """Why a request ended; set once. `ERROR` is never shown as a finish reason: the request fails instead."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _need(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise BadRequest(f"{name} must be {allowed}, got {shown(value)}", param=name)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to choose each token. The same settings, defaults and limits in `LLM` and in the server.

    temperature   0 is greedy; otherwise logits are divided by it. 0 to 100.
    top_k         keep the k most likely tokens; 0 or -1 keeps all.
    top_p         keep the smallest set whose probability reaches p. Over 0, at most 1.
    min_p         drop tokens below min_p times the most likely one's probability. 0 to 1.
    repetition_penalty  divides positive and multiplies negative logits of every token of prompt and output (CTRL). 0.01 to 100.
    presence_penalty, frequency_penalty  subtracted once, or times the count, for tokens of the output. -2 to 2.
    seed          the same seed gives the same noise whatever runs beside it, so in fp32 the same tokens; in bf16 the shape of
                  a batch can round two close logits the other way. None draws one.
    max_tokens    tokens to generate; None: as many as the window holds.
    stop          strings that end the answer and are not part of it.
    stop_token_ids  ids that end the answer, beside the model's own end-of-sequence ids.
    ignore_eos    the model's own end-of-sequence ids do not end the answer.
    logprobs      None: none; n: log-probability of each token and of the n most likely ones (of the raw logits).

    Raises BadRequest that names the field and what is allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list[str])
    stop_token_ids: list[int] = field(default_factory=list[int])
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # as OpenAI takes it
            self.stop = [self.stop]
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            _need(_number(value) and low <= value <= high, name, value, f"a number from {low:g} to {high:g}")
        _need(_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number over 0 and at most 1")
        penalty = self.repetition_penalty
        _need(_number(penalty) and 0.01 <= penalty <= 100, "repetition_penalty", penalty, "a number from 0.01 to 100")
        _need(_integer(self.top_k) and -1 <= self.top_k <= MAX_COUNT,
              "top_k", self.top_k, f"an integer: -1 or 0 for all, or k, at most {MAX_COUNT}")  # fmt: skip
        _need(self.max_tokens is None or (_integer(self.max_tokens) and 1 <= self.max_tokens <= MAX_COUNT),
              "max_tokens", self.max_tokens, f"an integer of at least 1 and at most {MAX_COUNT}")  # fmt: skip
        _need(self.seed is None or (_integer(self.seed) and -(2**63) <= self.seed < 2**64),
              "seed", self.seed, "an integer of at most 64 bits")  # fmt: skip
        _need(self.logprobs is None or (_integer(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
              "logprobs", self.logprobs, f"an integer from 0 to {MAX_LOGPROBS}")  # fmt: skip
        strings = all(isinstance(s, str) and s for s in self.stop)  # pyright: ignore[reportUnnecessaryIsInstance]
        _need(strings, "stop", self.stop, "non-empty strings")
        _need(all(_integer(i) and 0 <= i <= MAX_COUNT for i in self.stop_token_ids),
              "stop_token_ids", self.stop_token_ids, "a list of token ids")  # fmt: skip

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        """Whether the sampler has to look at the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Table(Protocol):
    """What the scheduler asks of a request's page table (`core.blocks.BlockTable`, stage 06)."""

    blocks: list[int]

    def missing(self, num_tokens: int) -> int: ...
    def extend(self, ids: list[int]) -> None: ...


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. The front fills the first five fields; the rest is the scheduler's and the engine's.

    A request *catches up*: `known` counts the tokens that exist or are on their way, `computed` those whose keys and
    values are written or will be by a plan already submitted; `known - computed` are pending. Prefill, a chunk of it,
    decode and verification differ in these numbers alone.
    """

    id: int
    tokens: list[int]  # the prompt, then every token of the answer
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # ids that end the answer: end-of-sequence ids and stop_token_ids
    hashes: list[bytes] = field(default_factory=list[bytes])  # one a full block of `tokens`; the engine extends it
    num_prompt: int = 0  # set from `tokens` below

    table: Table | None = None  # the engine gives one before Scheduler.add
    computed: int = 0
    in_flight: int = 0  # tokens being sampled by plans not yet collected; they count as known
    sent: deque[int] = field(default_factory=deque[int])  # tokens computed by each plan in flight, oldest first
    generation: int = 0  # raised by the engine at preemption, abort and finish: results of an older one are dropped
    slot: int = -1
    num_cached: int = 0  # prompt tokens taken from the prefix cache at the last admission
    num_published: int = 0  # blocks of the table already offered to the prefix cache
    preemptions: int = 0
    kept: int = 0  # tokens whose keys and values the engine holds on the host for its return; 0: it has to recompute
    arrived: float = 0.0  # when the engine took it, seconds of its monotonic clock
    queue_seconds: float | None = None  # from then to its first step
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the id that ended it, where it was not an end-of-sequence id

    def __post_init__(self) -> None:
        if not self.num_prompt:
            self.num_prompt = len(self.tokens)

    @property
    def known(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def pending(self) -> int:
        return self.known - self.computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_total(self) -> int:
        """Prompt plus the most tokens that may follow. The front resolves `max_tokens` before a request leaves it."""
        assert self.params.max_tokens is not None
        return self.num_prompt + self.params.max_tokens


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated token, of the raw logits (before temperature, penalties and filters)."""

    chosen: float
    top_ids: list[int]
    top: list[float]


@dataclass(slots=True)
class Output:
    """What a request got from one step: new ids, and how it ended if it did. `error` fails the request with that line.
    queue_seconds: how long the engine let it wait before its first step."""

    id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached: int = 0
    error: str | None = None
    queue_seconds: float = 0.0
