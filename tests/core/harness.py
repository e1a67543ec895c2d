"""Runs random scenarios through the real engine on the fake backend, checking every invariant after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cutaway.backends.fake import FakeBackend, _mix
from cutaway.core.errors import DoesNotFit
from cutaway.core.plan import Limits, StepPlan, Ticket
from cutaway.core.prefix_cache import chain
from cutaway.core.request import FinishReason, Request, SamplingParams
from cutaway.core.scheduler import Scheduler
from cutaway.engine.engine import Engine
from cutaway.engine.parts import Parts

VOCABULARY = 40
MASK = 2**64 - 1


def alone(
    prompt: list[int], params: SamplingParams, stop_ids: frozenset[int] = frozenset(), vocabulary: int = VOCABULARY
) -> list[int]:
    """What the fake backend answers, worked out from the tokens alone: no blocks, no engine, no steps."""
    tokens, answer, state, total = list(prompt), [], 1, 0
    for position in range(len(prompt) + params.max_tokens - 1):
        state = _mix((state * 0x9E3779B97F4A7C15 + tokens[position] * 0x632BE5AB + position) & MASK)
        total = (total + state * (((position + 1) * 0xD6E8FEB86659FD93 & MASK) | 1)) & MASK
        if position < len(prompt) - 1:
            continue
        noise = 0 if params.greedy else _mix((params.seed * 0x2545F4914F6CDD1D + position + 1) & MASK)
        answer.append(_mix(total ^ noise) % vocabulary)
        tokens.append(answer[-1])
        if answer[-1] in stop_ids:
            break
    return answer


class StrictBackend(FakeBackend):
    """The fake backend, refusing plans that break the limits."""

    limits: Limits

    def submit(self, plan: StepPlan) -> Ticket:
        assert plan.num_rows == len(set(plan.slot.tolist())) <= self.limits.rows
        assert 0 < plan.n_tokens.sum() <= self.limits.budget, "a step over budget"
        assert plan.n_tokens.min() >= 1, "a row without tokens"
        assert plan.n_tokens.max() <= max(self.limits.chunk, 1)
        assert ((plan.slot >= 0) & (plan.slot < self.limits.rows)).all()
        return super().submit(plan)

    def _stage(self, plan: StepPlan) -> None:
        """No row reads or writes a block that another writes in the same step: rows have no order on a device."""
        super()._stage(plan)
        size, writer = self._spec.block_size, {}
        rows = list(zip(plan.slot.tolist(), plan.start.tolist(), plan.n_tokens.tolist(), strict=True))
        for slot, start, n in rows:
            for block in set((self._rows[slot].places[start : start + n] // size).tolist()):
                assert writer.setdefault(block, slot) == slot, f"block {block} is written by two rows"
        for slot, start, _ in rows:
            for block in set((self._rows[slot].places[:start] // size).tolist()):
                assert writer.get(block, slot) == slot, f"block {block} is read while another row writes it"


@dataclass
class Job:
    """One request of a scenario. abort_after: steps from its arrival to its abort, None: runs to its end."""

    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    arrival: int = 0
    abort_after: int | None = None


@dataclass
class Scenario:
    jobs: list[Job]
    limits: Limits
    num_blocks: int
    depth: int = 0
    delay: int = 0
    cache: bool = True
    whole: bool = False  # stage 10's split instead of stage 11's
    swap: bool = False


def make_engine(scenario: Scenario) -> Engine:
    backend = StrictBackend(scenario.num_blocks, scenario.limits.block_size, vocabulary=VOCABULARY, delay=scenario.delay)
    backend.limits = scenario.limits
    if scenario.whole:
        backend.limits = Limits(
            scenario.limits.rows, scenario.limits.budget, 10**6, scenario.limits.window, scenario.limits.block_size
        )
    engine = Engine(backend, Parts(), scenario.limits, prefix_cache=scenario.cache, depth=scenario.depth,
                    preemption="swap" if scenario.swap else "recompute")  # fmt: skip
    if scenario.whole:
        engine.scheduler = Scheduler(engine.cache, scenario.limits)
    return engine


def check(engine: Engine) -> None:
    """Every file's own check, and what they cannot see: that references are exactly those of the tables."""
    engine.check()
    held = Counter(block for r in engine.scheduler.running for block in r.table.blocks)
    assert dict(held) == engine.cache._refs
    stats = engine.stats()
    assert stats.free + stats.cached + stats.used == stats.total
    assert stats.used == len(held) + 1


def must_fit(job: Job, s: Scenario) -> bool:
    """Whether the request can run at all, worked out from its length alone."""
    total = len(job.prompt) + job.params.max_tokens
    blocks = -(-(total - 1) // s.limits.block_size)
    return total <= s.limits.window and blocks <= s.num_blocks - 1 and (not s.whole or total - 1 <= s.limits.budget)


def run(s: Scenario) -> Engine:
    """Runs a scenario to its end and asserts that each request got what it gets alone."""
    engine = make_engine(s)
    answers: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}
    requests: dict[int, Request] = {}
    aborted: set[int] = set()
    step = 0
    last = max(job.arrival for job in s.jobs)
    while engine.has_work or step <= last:
        for id, job in enumerate(s.jobs):
            if job.arrival == step:
                request = Request(id, list(job.prompt), job.params, job.stop_ids, hashes_of(job, s))
                try:
                    engine.add(request)
                    assert must_fit(job, s)
                    requests[id], answers[id] = request, []
                except DoesNotFit:
                    assert not must_fit(job, s)
            if job.abort_after is not None and job.arrival + job.abort_after == step and id in requests:
                if id not in reasons:
                    aborted.add(id)
                engine.abort([id, id])
                assert not requests[id].table.blocks, "an abort left blocks"
                check(engine)
        for output in engine.step():
            assert output.id not in reasons, "an output after the end"
            answers[output.id] += output.token_ids
            if output.finish_reason:
                reasons[output.id] = output.finish_reason
        check(engine)
        order = list(requests)
        queue = [order.index(r.id) for r in (*engine.scheduler.running, *engine.scheduler.waiting)]
        assert queue == sorted(queue), "a request has passed one that came before it"
        step += 1
        assert step < 5000, "no progress"
    for id, request in requests.items():
        job = s.jobs[id]
        expected = alone(job.prompt, job.params, job.stop_ids)
        if id in aborted:
            assert reasons[id] is FinishReason.ABORT
            assert answers[id] == expected[: len(answers[id])]
        else:
            assert answers[id] == expected, f"request {id}"
            assert reasons[id] is (FinishReason.STOP if expected[-1] in job.stop_ids else FinishReason.LENGTH)
        assert request.tokens == job.prompt + answers[id]
    stats = engine.stats()
    assert (stats.used, stats.running, stats.waiting) == (1, 0, 0)
    assert stats.free + stats.cached == s.num_blocks - 1
    assert s.cache or not stats.cached
    assert sorted(engine._free_slots) == list(range(s.limits.rows))
    assert engine._swap is None or not engine._swap.held, "copies of requests that are gone"
    check_preemptions(s, requests)
    return engine


def hashes_of(job: Job, s: Scenario) -> list[bytes]:
    return chain(job.prompt, s.limits.block_size) if s.cache else []


def check_preemptions(s: Scenario, requests: dict[int, Request]) -> None:
    """A row is preempted only where it or an older one crosses into a new block, so at most as often as they do.

    With more than one token in flight, a row that is preempted for another can lose the token that crossed, and cross again.
    """
    size, older = s.limits.block_size, 0
    for id in sorted(requests, key=lambda id: s.jobs[id].arrival):  # stable: then by id, as they were added
        request = requests[id]
        own = -(-(request.max_total - 1) // size) - -(-min(request.num_prompt + 1, request.max_total - 1) // size)
        again = older if s.depth > 1 else 0
        assert request.preemptions <= older + own + again, f"request {id}: {request.preemptions} preemptions"
        older += own + (request.preemptions if s.depth > 1 else 0)
