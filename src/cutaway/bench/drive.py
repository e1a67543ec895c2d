"""An engine in this process, driven step by step: what `cpu` times and `invariance` compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cutaway.bench import workloads
from cutaway.checkpoints import open_checkpoint, resolve
from cutaway.core.errors import CutawayError
from cutaway.core.plan import Backend, Blocks, KVSpec, LateInputs, Limits, StepPlan, StepResult, Ticket
from cutaway.core.request import Output, Request, SamplingParams
from cutaway.engine.config import EngineConfig
from cutaway.engine.engine import Engine
from cutaway.engine.parts import Parts, load_module

WINDOW = 8192


def open_backend(config: EngineConfig, parts: Parts) -> Reused:
    """The backend that `config` names, with its model found by path, built-in name or hub id."""
    module, _, name = config.backend.partition(":")
    config = replace(config, model=str(resolve(config.model)))
    backend: Backend = getattr(load_module(module), name)(config, parts)
    facts: dict[str, Any] = getattr(backend, "info", dict[str, Any])()
    return Reused(backend, facts.get("window", WINDOW))


def highest_id(model: str) -> int:
    """The highest token id that a benchmark's prompts use of this model."""
    return min(workloads.HIGHEST_ID, open_checkpoint(resolve(model)).config.vocab_size - 1)


@dataclass(slots=True)
class Reused:
    """One loaded backend for several engines, one after the other, each with a pool of its own size.

    An engine tells the device of a slot's release with its next plan; after its last one nobody does, so the next engine's
    first plan brings what is left.
    """

    backend: Backend
    window: int = WINDOW
    num_blocks: int | None = None  # None: all that the backend has
    taken: set[int] = field(default_factory=set[int])
    fresh: bool = True

    def begin(self, num_blocks: int | None) -> None:
        self.num_blocks, self.fresh = num_blocks, True

    def kv(self) -> KVSpec:
        spec = self.backend.kv()
        return spec if self.num_blocks is None else replace(spec, num_blocks=self.num_blocks)

    def submit(self, plan: StepPlan) -> Ticket:
        if self.fresh:
            plan.released = sorted(self.taken) + plan.released
            self.fresh = False
        self.taken -= set(plan.released)
        self.taken |= {admission.slot for admission in plan.admitted}
        return self.backend.submit(plan)

    def late(self, ticket: Ticket, inputs: LateInputs) -> None:
        self.backend.late(ticket, inputs)

    def collect(self, ticket: Ticket) -> StepResult:
        return self.backend.collect(ticket)

    def export_blocks(self, ids: Sequence[int]) -> Blocks:
        return self.backend.export_blocks(ids)

    def import_blocks(self, ids: Sequence[int], blocks: Blocks) -> None:
        self.backend.import_blocks(ids, blocks)


@dataclass(slots=True)
class Run:
    """What one request got: its ids, and at each the margin between the two highest logits (NaN where not asked)."""

    ids: list[int] = field(default_factory=list[int])
    margins: list[float] = field(default_factory=list[float])
    num_cached: int = 0

    def take(self, output: Output) -> None:
        if output.error:
            raise CutawayError(f"request {output.id} failed: {output.error}")
        self.ids += output.token_ids
        self.num_cached = max(self.num_cached, output.num_cached)
        for entry in output.logprobs or ():
            self.margins.append(entry.top[0] - entry.top[1])


def engine(
    backend: Reused,
    parts: Parts,
    *,
    blocks: int | None = None,
    rows: int = 16,
    budget: int = 512,
    chunk: int = 512,
    depth: int = 0,
    cache: bool = False,
) -> Engine:
    """A new engine on it. Others before it must have no work left."""
    backend.begin(blocks)
    spec = backend.kv()
    window = min(backend.window, (spec.num_blocks - 1) * spec.block_size)
    limits = Limits(rows=rows, budget=budget, chunk=chunk, window=window, block_size=spec.block_size)
    return Engine(backend, parts, limits, prefix_cache=cache, depth=depth)


def request(
    id: int, tokens: Sequence[int], max_tokens: int, *, logprobs: int | None = None, hashes: Sequence[bytes] = ()
) -> Request:
    """A greedy request that end-of-sequence does not end."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    return Request(id, list(tokens), params, hashes=list(hashes))


def drive(
    running: Engine, requests: Sequence[Request], until: Callable[[dict[int, Run]], bool] | None = None
) -> dict[int, Run]:
    """Adds the requests and steps until all are done, or until `until` says so; what each got."""
    runs = {r.id: Run() for r in requests}
    for r in requests:
        running.add(r)
    while running.has_work and not (until and until(runs)):
        for output in running.step():
            runs[output.id].take(output)
    return runs
