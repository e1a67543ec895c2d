"""Step plans by hand, for tests of a backend without an engine: slots, blocks and tokens as the engine would send them.

    hand = Hand(create(config, parts))
    row = hand.admit(prompt)                 # a slot, blocks in shuffled order
    hand.step((row, 5), (other, 1))          # the next 5 tokens of one row, 1 of another: {row: sampled ids}
    hand.generate(row, 8)                    # ids of eight tokens

`hand.result` is the last StepResult. A row's `tokens` are what the host knows, its samples included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cutaway.backends.torch.runner import create
from cutaway.core.plan import Admission, Backend, LateInputs, StepPlan, StepResult
from cutaway.core.request import SamplingParams
from cutaway.engine.config import EngineConfig
from cutaway.engine.parts import Parts

PROMPT = [int(t) for t in np.random.default_rng(0).integers(3, 384, 53)]
OTHERS = [[int(t) for t in np.random.default_rng(i).integers(3, 384, n)] for i, n in enumerate((1, 16, 17, 31, 40), start=1)]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@dataclass(eq=False)
class Row:
    slot: int
    tokens: list[int]
    params: SamplingParams
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    sent: int = 0  # blocks that the backend knows of
    admitted: bool = False

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class Hand:
    def __init__(self, backend: Backend, seed: int = 0):
        self.backend = backend
        self.size = backend.kv().block_size
        self.free = [int(b) for b in np.random.default_rng(seed).permutation(np.arange(1, backend.kv().num_blocks))]
        self.slots = list(range(16))
        self.released: list[int] = []
        self.result: StepResult | None = None
        self.steps = 0

    def admit(
        self, tokens: Sequence[int], params: SamplingParams = GREEDY, *, blocks: Sequence[int] = (), slot: int | None = None
    ) -> Row:
        """`blocks`: already computed ones, from a prefix cache."""
        slot = self.slots[0] if slot is None else slot
        self.slots.remove(slot)
        return Row(slot, list(tokens), params, len(tokens), list(blocks), computed=len(blocks) * self.size)

    def release(self, row: Row, keep_blocks: bool = False) -> None:
        self.slots.insert(0, row.slot)
        self.released.append(row.slot)
        if not keep_blocks:
            self.free = row.blocks + self.free  # taken again at once: what they hold must not matter

    def plan(self, *work: tuple[Any, ...], copies: Sequence[tuple[int, int]] = (), late: bool = False) -> StepPlan:
        """work: (row, tokens) or (row, tokens, drafts); the drafts follow the row's tokens and count beside them."""
        rows = [w[0] for w in work]
        drafts = [list(w[2]) if len(w) > 2 else [] for w in work]
        counts = [w[1] + len(d) for w, d in zip(work, drafts, strict=True)]
        admitted, first, offsets, ids = [], [], [0], []
        for row, n in zip(rows, counts, strict=True):
            if not row.admitted:
                tokens = np.array(row.tokens, np.int32)
                admitted.append(Admission(row.slot, row.params, tokens, row.num_prompt))
                row.admitted = True
            while len(row.blocks) * self.size < row.computed + n:
                row.blocks.append(self.free.pop(0))
            first.append(row.sent)
            ids += row.blocks[row.sent :]
            offsets.append(len(ids))
            row.sent = len(row.blocks)
        released, self.released = self.released, []
        self.steps += 1

        def column(values: Sequence[int]) -> Any:
            return np.array(values, np.int32)

        return StepPlan(
            step=self.steps,
            slot=column([r.slot for r in rows]),
            generation=column([7] * len(rows)),
            start=column([r.computed for r in rows]),
            n_tokens=column(counts),
            n_drafts=column([len(d) for d in drafts]),
            samples=np.array([w[1] == r.pending for w, r in zip(work, rows, strict=True)], bool),
            token_ids=column([] if late else [t for d in drafts for t in d]),
            block_first=column(first),
            block_offsets=column(offsets),
            block_ids=column(ids),
            copies=list(copies),
            admitted=admitted,
            released=released,
            late=late,
        )

    def step(self, *work: tuple[Any, ...], copies: Sequence[tuple[int, int]] = (), late: LateInputs | None = None) -> dict:
        plan = self.plan(*work, copies=copies, late=late is not None)
        ticket = self.backend.submit(plan)
        if late is not None:
            self.backend.late(ticket, late)
        return self.take(work, self.backend.collect(ticket))

    def take(self, work: Sequence[tuple[Any, ...]], result: StepResult) -> dict:
        self.result = result
        answer = {}
        for index, (row, n, *_) in enumerate(work):
            ids = result.token_ids[result.token_offsets[index] : result.token_offsets[index + 1]].tolist()
            row.computed += n + int(result.n_accepted[index])
            row.tokens += ids
            answer[row] = ids
        return answer

    def generate(self, row: Row, n: int, chunk: int = 10**9) -> list[int]:
        before = len(row.tokens)
        while len(row.tokens) < before + n:
            self.step((row, min(chunk, row.pending)))
        return row.tokens[before:]


class Seen:
    """A backend of `model`, and the logits that its sampler got at the last step."""

    def __init__(self, model: Any, *, parts: dict[str, str] | None = None, **settings: Any):
        self.parts = Parts(parts or {}, observe={"sampler": self._observe})
        config = EngineConfig(model=str(model), **({"kv_blocks": 64, "threads": 1, "dtype": "fp32"} | settings))
        self.backend = create(config, self.parts)
        self.logits = np.zeros((0, 0), np.float32)

    def _observe(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if call == "sample":
            self.logits = args[0].to(torch.float32).numpy().copy()

    def hand(self, seed: int = 0) -> Hand:
        return Hand(self.backend, seed)


def alone(folder, prompt, n, params=GREEDY, **settings):
    """Ids and the logits of the last of them, of a request that has the backend to itself."""
    seen = Seen(folder, **settings)
    hand = seen.hand(seed=99)
    ids = hand.generate(hand.admit(prompt, params), n)
    return ids, seen.logits[-1]
