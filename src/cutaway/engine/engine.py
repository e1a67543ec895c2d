"""The step loop: what stands between the scheduler's decisions and a backend that may still be computing earlier ones.

One code path for any depth of overlap: a step is scheduled and submitted, and the oldest result is collected once more than
`depth` plans are in flight. Here, and in no part, is the bookkeeping that this needs: tickets, generations, slots, and what
each slot of the device already knows.

Invariants: a slot belongs to at most one request; it is released in a plan before another request takes it; the result of
a row counts only if its request still has the generation of that plan; a token is emitted once, in order; the device's
copy of a table differs from the host's only in blocks that the next plan of that row brings.
"""

from __future__ import annotations

import heapq
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from cutaway.core.errors import BadRequest, CutawayError
from cutaway.core.plan import Admission, Backend, Limits, Schedule, StepPlan, StepResult, Ticket
from cutaway.core.request import FinishReason, Output, Request, TokenLogprobs
from cutaway.engine.parts import CacheLike, Parts, SchedulerLike
from cutaway.engine.swap import Swap
from cutaway.engine.trace import StepTrace, TraceWriter


@dataclass(slots=True)
class Stats:
    """Where the engine stands after a step. Blocks are counted with the dummy block in `used`; the rest adds up since start."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    rows: int = 0  # of the last step
    free: int = 0
    cached: int = 0
    used: int = 0
    total: int = 0
    step_seconds: float = 0.0
    preemptions: int = 0
    prefix_hit_tokens: int = 0  # of prompt_tokens: what a preempted row finds of its own again is not counted
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    swapped_out: int = 0  # blocks copied to the host when their requests were preempted, and back
    swapped_in: int = 0


@dataclass(slots=True)
class _InFlight:
    """A submitted plan: its ticket, and the generation at which each of its rows was submitted."""

    ticket: Ticket
    rows: list[tuple[Request, int]]
    trace: StepTrace | None


@dataclass(slots=True)
class _Slot:
    """What a device row knows: its table, of which blocks before `stable` cannot change any more, and `computed` tokens."""

    blocks: list[int] = field(default_factory=list[int])
    stable: int = 0
    computed: int = 0


class Engine:
    """Requests in, outputs out, one step at a time. `LLM` drives it in process, the engine process behind a channel.

    >>> engine.add(Request(0, tokens=[1, 2, 3], params=SamplingParams(max_tokens=8)))
    >>> while engine.has_work:
    ...     for output in engine.step():
    ...         print(output.id, output.token_ids, output.finish_reason)
    """

    def __init__(
        self,
        backend: Backend,
        parts: Parts,
        limits: Limits,
        *,
        prefix_cache: bool = True,
        depth: int = 0,
        preemption: Literal["recompute", "swap"] = "recompute",
        trace: TraceWriter | None = None,
    ):
        spec = backend.kv()
        if spec.block_size != limits.block_size:
            raise CutawayError(f"the backend's blocks hold {spec.block_size} tokens, the limits say {limits.block_size}")
        if min(limits.rows, limits.budget, limits.chunk, limits.window) < 1 or depth < 0:
            raise CutawayError(
                f"rows, budget, chunk and window must be at least 1 and depth at least 0: {limits}, depth {depth}"
            )
        blocks, cache = parts.get("blocks"), parts.get("prefix_cache")
        self.limits = limits
        self.depth = depth
        self.cache: CacheLike = cache.PrefixCache(blocks.BlockAllocator(spec.num_blocks, spec.block_size), publish=prefix_cache)
        self.scheduler: SchedulerLike = parts.get("scheduler").Scheduler(self.cache, limits, split=parts.get("chunked").split)
        self._backend = backend
        self._swap = Swap(backend, spec.block_size, room=spec.num_blocks) if preemption == "swap" else None
        self._parts = parts
        self._new_table = blocks.BlockTable
        self._chain = cache.chain if prefix_cache else None
        self._trace = trace
        self._debug = os.environ.get("CUTAWAY_DEBUG") == "1"
        self._requests: dict[int, Request] = {}
        self._hits: dict[int, int] = {}  # of each, prompt tokens found at its first admission
        self._in_flight: deque[_InFlight] = deque()
        self._slots = [_Slot() for _ in range(limits.rows)]
        self._free_slots = list(range(limits.rows))
        self._released: list[int] = []  # slots that the next plan tells the device to forget
        self._ended: list[Output] = []  # aborted since the last step
        self._stats = Stats(total=spec.num_blocks)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._in_flight or self._ended)

    def add(self, request: Request) -> None:
        """Takes a request whose `max_tokens` is set. Raises BadRequest, DoesNotFit where it could never run; others go on."""
        if request.id in self._requests:
            raise BadRequest(f"there is a request {request.id} already")
        if not request.tokens:
            raise BadRequest("the prompt has no tokens", param="prompt")
        if min(request.tokens) < 0 or max(request.tokens) >= 2**31:
            raise BadRequest(f"token ids must be from 0 to {2**31 - 1}", param="prompt")
        if request.params.max_tokens is None:
            raise BadRequest("max_tokens is not set", param="max_tokens")
        seed = random.getrandbits(63) if request.params.seed is None else request.params.seed
        request.params = replace(request.params, seed=(seed + 2**63) % 2**64 - 2**63)  # as a device's int64
        request.table = self._new_table(self.limits.block_size)
        request.arrived = time.monotonic()
        self.scheduler.add(request)
        self._requests[request.id] = request
        self._stats.prompt_tokens += request.num_prompt
        self._extend_hashes(request)

    def abort(self, ids: Sequence[int]) -> None:
        """Ends requests in any state; their blocks are free at once. Unknown ids are nothing. `step` reports them."""
        for id in ids:
            if id in self._requests:
                request = self._requests[id]
                self.scheduler.abort(id)
                self._ended.append(self._end(request, FinishReason.ABORT))

    def step(self) -> list[Output]:
        """Schedules and submits a step, collects the oldest once more than `depth` are in flight; what came of it."""
        began = time.perf_counter()
        outputs, self._ended = self._ended, []
        self._parts.step = self._stats.step
        schedule = self._schedule()
        for request in schedule.preempted:
            self._give_up_slot(request)
        self._stats.preemptions += len(schedule.preempted)
        if self._trace:
            self._trace.between(schedule.preempted, [o.id for o in outputs])
        if schedule.rows:
            self._submit(schedule)
        elif not self._in_flight and self._requests:
            raise RuntimeError(f"{len(self._requests)} requests are left and the scheduler runs none of them")
        if self._in_flight and (len(self._in_flight) > self.depth or not schedule.rows):
            outputs = outputs + self._collect(self._in_flight.popleft())
        self._stats.step_seconds = time.perf_counter() - began
        self._stats.rows = len(schedule.rows)
        if self._debug:
            self.check()
        return outputs

    def stats(self) -> Stats:
        """A copy of the counters, for `/metrics`."""
        free, cached = self.cache.num_free - self.cache.num_cached, self.cache.num_cached
        return replace(
            self._stats,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free=free,
            cached=cached,
            used=self._stats.total - free - cached,
            swapped_out=self._swap.swapped_out if self._swap else 0,
            swapped_in=self._swap.swapped_in if self._swap else 0,
        )

    def check(self) -> None:
        """Asserts the invariants of this file and of the scheduler's and the cache's."""
        self.scheduler.check()
        self.cache.check()
        running = {r.id: r for r in self.scheduler.running}
        queued = running.keys() | {r.id for r in self.scheduler.waiting}
        assert queued == self._requests.keys(), f"requests {queued ^ self._requests.keys()} are queued or known, not both"
        taken = sorted(r.slot for r in running.values())
        assert sorted(taken + self._free_slots) == list(range(self.limits.rows)), "slots leaked or are shared"
        assert all(r.slot == -1 for r in self.scheduler.waiting), "a waiting request has a slot"
        assert len(self._in_flight) <= self.depth, "more plans are in flight than the depth"
        sent = dict.fromkeys(running, 0)
        for flight in self._in_flight:
            for request, generation in flight.rows:
                if request.generation == generation and request.id in sent:
                    sent[request.id] += 1
        assert all(len(running[id].sent) == n for id, n in sent.items()), (
            "a request and the tickets differ in what is in flight"
        )

    def _schedule(self) -> Schedule:
        """The scheduler's decision, with what is swapped for it. A preempted request's table is empty then, and what its slot
        knows may be older than the last block that changed place: so tables are noted before."""
        if self._swap is None:
            return self.scheduler.schedule()
        before = {r.id: (list(r.table.blocks), self._slots[r.slot].computed) for r in self.scheduler.running if r.table}
        schedule = self.scheduler.schedule()
        self._swap.step(schedule, before)
        return schedule

    def _submit(self, schedule: Schedule) -> None:
        admitted = [self._take_slot(request) for request in schedule.admitted]
        plan = self._plan(schedule, admitted)
        trace = None
        if self._trace:
            trace = self._trace.scheduled(plan.step, self.limits.budget, schedule, self.scheduler.waiting)
        self._released = []
        rows = [(request, request.generation) for request, _, _ in schedule.rows]
        self._in_flight.append(_InFlight(self._backend.submit(plan), rows, trace))
        self._stats.step += 1
        self._stats.computed_tokens += int(plan.n_tokens.sum())
        self._stats.prefix_hit_tokens += sum(r.num_cached for r in schedule.admitted if not r.preemptions)
        for request in schedule.admitted:  # one that comes back has found its own blocks, which nobody saved it
            request.num_cached = self._hits.setdefault(request.id, request.num_cached)

    def _plan(self, schedule: Schedule, admitted: list[Admission]) -> StepPlan:
        first: list[int] = []
        offsets = [0]
        new: list[int] = []
        for request, start, tokens in schedule.rows:
            first.append(self._new_blocks(request, new))
            offsets.append(len(new))
            self._slots[request.slot].computed = start + tokens
        rows = schedule.rows
        return StepPlan(
            step=self._stats.step,
            slot=np.array([r.slot for r, _, _ in rows], np.int32),
            generation=np.array([r.generation for r, _, _ in rows], np.int32),
            start=np.array([start for _, start, _ in rows], np.int32),
            n_tokens=np.array([n for _, _, n in rows], np.int32),
            n_drafts=np.zeros(len(rows), np.int32),
            samples=np.array([start + n >= len(r.tokens) for r, start, n in rows], np.bool_),
            token_ids=np.empty(0, np.int32),
            block_first=np.array(first, np.int32),
            block_offsets=np.array(offsets, np.int32),
            block_ids=np.array(new, np.int32),
            copies=list(schedule.copies),
            admitted=admitted,
            released=self._released,
        )

    def _new_blocks(self, request: Request, new: list[int]) -> int:
        """Appends what the device lacks of the row's table to `new`; answers the index of the first of them.

        A block changes place when its content was found published already, or was copied before a write; neither happens
        to a block that has been offered to the cache before.
        """
        assert request.table is not None
        slot, blocks = self._slots[request.slot], request.table.blocks
        first = len(slot.blocks)
        if blocks[slot.stable : first] != slot.blocks[slot.stable :]:
            first = next(i for i in range(slot.stable, first) if blocks[i] != slot.blocks[i])
        new.extend(blocks[first:])
        slot.blocks[first:] = blocks[first:]
        slot.stable = request.num_published
        return first

    def _collect(self, flight: _InFlight) -> list[Output]:
        result = self._backend.collect(flight.ticket)
        offsets, ids, bad = result.token_offsets.tolist(), result.token_ids.tolist(), result.bad.tolist()
        outputs: list[Output] = []
        live: list[tuple[int, Request, list[int]]] = []
        for row, (request, generation) in enumerate(flight.rows):
            if request.generation != generation:
                continue  # preempted, aborted or finished since; its token is sampled again or nobody's
            if bad[row]:
                self.scheduler.abort(request.id)
                outputs.append(self._end(request, FinishReason.ERROR, "the model's logits were not finite (NaN or infinity)"))
            else:
                live.append((row, request, ids[offsets[row] : offsets[row + 1]]))
        before = [len(request.tokens) for _, request, _ in live]
        for request in self.scheduler.apply([(request, tokens) for _, request, tokens in live]):
            self._end(request, request.finish_reason or FinishReason.LENGTH)
        for (row, request, _), old in zip(live, before, strict=True):
            if new := request.tokens[old:]:
                outputs.append(self._output(request, new, result, offsets[row]))
                if not request.finish_reason:
                    self._extend_hashes(request)
        if self._trace and flight.trace:
            ended = [o.id for o in outputs if o.finish_reason]
            if not self._trace.collected(flight.trace, ended, self.stats(), result.n_accepted.tolist()):
                self._trace = None
        return outputs

    def _output(self, request: Request, new: list[int], result: StepResult, offset: int) -> Output:
        self._stats.output_tokens += len(new)
        logprobs = None
        wanted = request.params.logprobs
        if wanted is not None and (found := result.logprobs):
            logprobs = [
                TokenLogprobs(float(found.chosen[i]), found.top_ids[i, :wanted].tolist(), found.top[i, :wanted].tolist())
                for i in range(offset, offset + len(new))
            ]
        waited = request.queue_seconds or 0.0
        return Output(
            request.id, new, logprobs, request.finish_reason, request.stop_reason, request.num_cached, queue_seconds=waited
        )

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        """Forgets a request that the scheduler holds no more; what is in flight for it will be dropped."""
        del self._requests[request.id]
        self._hits.pop(request.id, None)
        if self._swap:
            self._swap.forget(request)
        request.finish_reason = reason
        if reason is FinishReason.STOP and request.tokens[-1] in request.params.stop_token_ids:
            request.stop_reason = request.tokens[-1]
        if request.slot >= 0:
            self._give_up_slot(request)
        return Output(request.id, [], finish_reason=reason, num_cached=request.num_cached, error=error)

    def _take_slot(self, request: Request) -> Admission:
        if request.queue_seconds is None:  # not one that comes back from a preemption
            request.queue_seconds = time.monotonic() - request.arrived
        request.slot = heapq.heappop(self._free_slots)
        self._slots[request.slot] = _Slot()
        return Admission(request.slot, request.params, np.array(request.tokens, np.int32), request.num_prompt)

    def _give_up_slot(self, request: Request) -> None:
        heapq.heappush(self._free_slots, request.slot)
        self._released.append(request.slot)
        request.slot = -1
        request.generation += 1

    def _extend_hashes(self, request: Request) -> None:
        """Hashes of the blocks that have become full, so that answers are shared, too."""
        size = self.limits.block_size
        if self._chain and len(request.tokens) // size > len(request.hashes):
            done = len(request.hashes)
            parent = request.hashes[-1] if done else b""
            request.hashes += self._chain(request.tokens[done * size :], size, parent)
