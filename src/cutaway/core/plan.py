"""The seam between the engine and its backends: what a step computes (`StepPlan`) and what came of it (`StepResult`).

Columns are NumPy arrays with one row a scheduled request, so that a backend moves a step to its device in a few copies.
A plan is a diff: a row's tokens arrive once, when it is admitted to a slot, and its blocks as they are added; the backend
keeps both, and appends to the slot's tokens what it samples itself. The host never sends a sampled token back, so a row
may be in two plans in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cutaway.core.request import Request, SamplingParams

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

DUMMY_BLOCK = 0  # never handed out; padding rows write there


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV pool of a backend. `num_blocks` counts the dummy block; `buckets` are row counts with a captured graph."""

    num_blocks: int
    block_size: int
    bytes_per_block: int  # all layers, keys and values
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and a request may take. rows: requests at once; budget: tokens a step; chunk: most tokens of one
    prompt a step; window: most tokens of a sequence; block_size: tokens a block."""

    rows: int = 16
    budget: int = 512
    chunk: int = 512
    window: int = 8192
    block_size: int = 16


@dataclass(slots=True)
class Schedule:
    """What `Scheduler.schedule` decided. rows: (request, first position, number of tokens), none of them zero."""

    rows: list[tuple[Request, int, int]] = field(default_factory=list[tuple[Request, int, int]])
    admitted: list[Request] = field(default_factory=list[Request])
    preempted: list[Request] = field(default_factory=list[Request])
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (source, destination) blocks


@dataclass(slots=True)
class Admission:
    """A request that takes a slot: all tokens known so far (a resumed request brings its answer along)."""

    slot: int
    params: SamplingParams  # seed is set
    tokens: Ints
    num_prompt: int  # penalties tell prompt from answer


@dataclass(slots=True)
class StepPlan:
    """One step. Order of effects: released, admitted, blocks, copies, then the rows.

    slot, generation, start, n_tokens, n_drafts  int32 [rows]
    samples       bool [rows]: the row's last token is the newest one known, so a token is sampled after it
    token_ids     int32 [sum(n_drafts)]: draft tokens, which the device has not got
    block_first   int32 [rows]: index in the row's table of its first new block
    block_offsets int32 [rows + 1], block_ids int32: new blocks of each row (CSR)
    late          masks or drafts follow by `Backend.late`, after the logits and before sampling
    """

    step: int
    slot: Ints
    generation: Ints
    start: Ints
    n_tokens: Ints
    n_drafts: Ints
    samples: Flags
    token_ids: Ints
    block_first: Ints
    block_offsets: Ints
    block_ids: Ints
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    admitted: list[Admission] = field(default_factory=list[Admission])
    released: list[int] = field(default_factory=list[int])
    late: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.slot)


@dataclass(slots=True)
class LateInputs:
    """What the host adds between logits and sampling. masks uint32 [rows, ceil(vocabulary / 32)], bit set = allowed;
    token_ids int32 [sum(n_drafts)]."""

    masks: NDArray[np.uint32] | None = None
    token_ids: Ints | None = None


@dataclass(slots=True)
class Logprobs:
    """Of the raw logits, aligned with StepResult.token_ids; rows that did not ask hold NaN.
    chosen float32 [n], top_ids int32 [n, k], top float32 [n, k], best first; k is the most that any row asked for."""

    chosen: Floats
    top_ids: Ints
    top: Floats


@dataclass(slots=True)
class StepResult:
    """The rows of the plan, in its order. token_offsets int32 [rows + 1] and token_ids: sampled tokens (CSR; none for a
    row that does not sample); n_accepted: drafts accepted; bad: the row's logits were not finite."""

    slot: Ints
    generation: Ints
    n_accepted: Ints
    token_offsets: Ints
    token_ids: Ints
    bad: Flags
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class Blocks:
    """KV blocks on the host, for swap, offload and hand-over: uint8 [blocks, bytes_per_block]."""

    data: NDArray[np.uint8]


@dataclass(slots=True)
class Ticket:
    """A submitted plan. `payload` is the backend's own."""

    step: int
    payload: object = None


class Backend(Protocol):
    """A model on a device. One queue: plans take effect in the order of submission."""

    def kv(self) -> KVSpec: ...

    def submit(self, plan: StepPlan) -> Ticket:
        """Starts the step; never waits for the device."""
        ...

    def late(self, ticket: Ticket, inputs: LateInputs) -> None:
        """Only for plans with `late`: masks and drafts, before sampling."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits for the step's result. Tickets are collected in order, once."""
        ...

    def export_blocks(self, ids: Sequence[int]) -> Blocks:
        """A copy on the host, as the plans submitted so far leave them."""
        ...

    def import_blocks(self, ids: Sequence[int], blocks: Blocks) -> None:
        """Writes such a copy: after the plans submitted so far, before the next."""
        ...
