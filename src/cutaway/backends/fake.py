"""A backend without a model: the engine's own tests and `bench front` run on it.

Its KV pool is real memory, addressed through block tables as a model's is. At each position it stores a value made of
the token, the position and the value before it; the next token is a hash over all values of the row. Both are read back
through the table, so a wrong, stale or uncopied block, or a write by a row that should be dead, changes what follows.

The ids depend on the tokens so far and on (seed, position) where the temperature is not 0, and on nothing else.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cutaway.core.plan import DUMMY_BLOCK, Blocks, KVSpec, LateInputs, Logprobs, StepPlan, StepResult, Ticket
from cutaway.core.request import SamplingParams

_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """The finaliser of MurmurHash3: every bit of 64 depends on every other."""
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    return x ^ (x >> 33)


@dataclass(slots=True)
class _Row:
    """What the device keeps of a slot. `places`: index in the pool of each position that its table covers."""

    params: SamplingParams
    tokens: list[int]
    places: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    poisoned: bool = False


class FakeBackend:
    """Implements `core.plan.Backend`.

    num_blocks, block_size  the pool; the dummy block is counted
    vocabulary   ids are 0 to vocabulary - 1
    delay        plans that stay uncomputed behind the newest one: what `collect` has not asked for is computed that late
    seconds      what a step takes on top of its own work
    poison       a row that holds this token id gets logits that are not finite
    """

    def __init__(
        self,
        num_blocks: int = 257,
        block_size: int = 16,
        *,
        vocabulary: int = 32000,
        delay: int = 0,
        seconds: float = 0.0,
        poison: int | None = None,
    ):
        self.vocabulary = vocabulary
        self.delay = delay
        self.seconds = seconds
        self.poison = poison
        self._spec = KVSpec(num_blocks, block_size, bytes_per_block=8 * block_size)
        self._kv = np.random.default_rng(0).integers(
            0, 2**63, num_blocks * block_size, dtype=np.uint64
        )  # as memory is: not zero
        self._weights = np.empty(0, np.uint64)
        self._rows: dict[int, _Row] = {}
        self._queue: deque[tuple[Ticket, StepPlan]] = deque()
        self._results: dict[int, StepResult] = {}
        self.computed = 0  # positions so far

    def kv(self) -> KVSpec:
        return self._spec

    def info(self) -> dict[str, object]:
        return {
            "model": "fake",
            "vocabulary": self.vocabulary,
            "kv_blocks": self._spec.num_blocks,
            "step_seconds": self.seconds,
        }

    def submit(self, plan: StepPlan) -> Ticket:
        ticket = Ticket(plan.step)
        self._queue.append((ticket, plan))
        while len(self._queue) > self.delay:
            self._compute_oldest()
        return ticket

    def late(self, ticket: Ticket, inputs: LateInputs) -> None:
        raise NotImplementedError("the fake backend has no masks and no drafts")

    def collect(self, ticket: Ticket) -> StepResult:
        while ticket.step not in self._results:
            self._compute_oldest()
        return self._results.pop(ticket.step)

    def export_blocks(self, ids: Sequence[int]) -> Blocks:
        self._catch_up()
        pool = self._kv.reshape(self._spec.num_blocks, self._spec.block_size)
        return Blocks(pool[list(ids)].view(np.uint8).copy())

    def import_blocks(self, ids: Sequence[int], blocks: Blocks) -> None:
        self._catch_up()
        pool = self._kv.reshape(self._spec.num_blocks, self._spec.block_size)
        pool[list(ids)] = blocks.data.view(np.uint64)

    def _catch_up(self) -> None:
        while self._queue:
            self._compute_oldest()

    def _compute_oldest(self) -> None:
        ticket, plan = self._queue.popleft()
        if self.seconds:
            time.sleep(self.seconds)
        self._stage(plan)
        rows = list(zip(plan.slot.tolist(), plan.start.tolist(), plan.n_tokens.tolist(), plan.samples.tolist(), strict=True))
        ids: list[int] = []
        offsets = [0]
        bad: list[bool] = []
        for slot, start, n, samples in rows:
            row = self._rows[slot]
            self._write(row, start, n)
            if samples:
                row.tokens.append(self._next(row, start + n))
                ids.append(row.tokens[-1])
            offsets.append(len(ids))
            bad.append(row.poisoned)
        self._results[ticket.step] = StepResult(
            slot=plan.slot,
            generation=plan.generation,
            n_accepted=np.zeros(len(rows), np.int32),
            token_offsets=np.array(offsets, np.int32),
            token_ids=np.array(ids, np.int32),
            bad=np.array(bad, np.bool_),
            logprobs=self._logprobs(rows, ids),
        )

    def _stage(self, plan: StepPlan) -> None:
        """The plan's changes to slots and tables, in the order that the seam gives."""
        size = self._spec.block_size
        for slot in plan.released:
            del self._rows[slot]
        for a in plan.admitted:
            assert a.slot not in self._rows, f"slot {a.slot} is taken"
            assert a.params.seed is not None
            tokens = a.tokens.tolist()
            self._rows[a.slot] = _Row(a.params, tokens, poisoned=self.poison in tokens)
        inside = np.arange(size)
        first, offsets = plan.block_first.tolist(), plan.block_offsets.tolist()
        for i, slot in enumerate(plan.slot.tolist()):
            if offsets[i] < offsets[i + 1]:
                blocks = plan.block_ids[offsets[i] : offsets[i + 1]].astype(np.int64)
                assert (blocks != DUMMY_BLOCK).all(), f"slot {slot} is given the dummy block"
                row = self._rows[slot]
                row.places = np.concatenate((row.places[: first[i] * size], (blocks[:, None] * size + inside).ravel()))
        pool = self._kv.reshape(-1, size)
        for source, target in plan.copies:
            pool[target] = pool[source]

    def _write(self, row: _Row, start: int, n: int) -> None:
        state = int(self._kv[row.places[start - 1]]) if start else 1
        values: list[int] = []
        for position in range(start, start + n):
            state = _mix(state * 0x9E3779B97F4A7C15 + row.tokens[position] * 0x632BE5AB + position & _MASK)
            values.append(state)
        self._kv[row.places[start : start + n]] = values
        self.computed += n

    def _next(self, row: _Row, length: int) -> int:
        if len(self._weights) < length:
            self._weights = np.arange(1, 2 * length + 1, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93) | np.uint64(1)
        seen = int((self._kv[row.places[:length]] * self._weights[:length]).sum())
        if not row.params.greedy:
            seen ^= _mix((row.params.seed or 0) * 0x2545F4914F6CDD1D + length & _MASK)
        return _mix(seen) % self.vocabulary

    def _logprobs(self, rows: list[tuple[int, int, int, bool]], ids: list[int]) -> Logprobs | None:
        """Figures that belong to the id: -1 - id / vocabulary for the one chosen, one less for each rank below."""
        asked = [self._rows[slot].params.logprobs for slot, _, _, samples in rows if samples]
        if not any(n is not None for n in asked):
            return None
        ranks = np.arange(max(n or 0 for n in asked))
        chosen = -1 - np.array(ids, np.float32) / np.float32(self.vocabulary)
        chosen[[n is None for n in asked]] = np.nan
        top_ids = (np.array(ids)[:, None] + ranks) % self.vocabulary
        return Logprobs(chosen, top_ids.astype(np.int32), (chosen[:, None] - ranks).astype(np.float32))


class Config(Protocol):
    """What is read of `engine.config.EngineConfig`."""

    kv_blocks: int | None
    max_num_seqs: int
    max_model_len: int | None


def create(config: Config, parts: object = None) -> FakeBackend:
    """For `EngineConfig(backend="cutaway.backends.fake:create")`. CUTAWAY_FAKE_VOCABULARY and CUTAWAY_FAKE_SECONDS (a step's
    time) set what the configuration has no word for."""
    window = config.max_model_len or 8192
    blocks = config.kv_blocks or min(config.max_num_seqs, 16) * -(-window // 16) + 1
    return FakeBackend(
        blocks,
        vocabulary=int(os.environ.get("CUTAWAY_FAKE_VOCABULARY", "32000")),
        seconds=float(os.environ.get("CUTAWAY_FAKE_SECONDS", "0")),
        delay=1,
    )
