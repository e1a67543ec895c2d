"""Preemption that swaps: the answers of a run without memory pressure, with less computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from cutaway import LLM, SamplingParams
from cutaway.core.plan import Schedule
from cutaway.core.request import Request
from cutaway.core.scheduler import Scheduler
from cutaway.engine.engine import Engine
from cutaway.engine.swap import Swap
from looping import Recorder, a_request, answer, drain, ids, make

JOBS = [(0, 40, 60), (1, 30, 60), (2, 25, 50), (3, 20, 40)]  # id, prompt, answer: 76 blocks of 4 in all


def under_pressure(preemption: str, depth: int = 0, blocks: int = 40, **options: Any) -> Engine:
    """Four requests that need twice the pool; each gets what it gets alone."""
    engine = make(depth, Recorder(blocks, delay=depth), preemption=preemption, **options)
    outputs = finish(engine)
    for id, length, tokens in JOBS:
        assert ids(outputs[id]) == answer(a_request(id, length, tokens))
    return engine


def finish(engine: Engine) -> dict[int, Any]:
    for id, length, tokens in JOBS:
        engine.add(a_request(id, length, tokens))
    return drain(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_is_swapped_is_not_computed_again(depth: int, prefix_cache: bool) -> None:
    """Without preemption each position is computed once; a row that comes back computes its newest token's again, no more."""
    again = {}
    for preemption in ("recompute", "swap"):
        engine = under_pressure(preemption, depth, prefix_cache=prefix_cache)
        stats = engine.stats()
        assert stats.preemptions > 2
        again[preemption] = stats.computed_tokens - sum(length + tokens - 1 for _, length, tokens in JOBS)
        assert (stats.swapped_out > 0, stats.swapped_in > 0) == (preemption == "swap",) * 2
    assert again["swap"] <= (1 + depth) * stats.preemptions
    assert again["recompute"] > again["swap"]


def test_a_scheduler_that_knows_nothing_of_it_recomputes() -> None:
    class Old(Scheduler):
        def _admit(self, request: Request, budget: int, step: Schedule) -> int:
            kept, request.kept = request.kept, 0
            tokens = super()._admit(request, budget, step)
            request.kept = kept
            return tokens

    engine = make(0, Recorder(40), preemption="swap")
    engine.scheduler = Old(engine.cache, engine.limits, split=engine.scheduler._split)
    outputs = finish(engine)
    assert [ids(outputs[id]) for id, *_ in JOBS] == [answer(a_request(*job)) for job in JOBS]
    stats = engine.stats()
    assert (stats.swapped_in, engine._swap.held) == (0, 0)
    assert stats.swapped_out > 0


def test_the_copies_have_bounded_room() -> None:
    engine = make(0, Recorder(40), preemption="swap")
    engine._swap = Swap(engine._backend, 4, room=12)
    most = 0
    for job in JOBS:
        engine.add(a_request(*job))
    while engine.has_work:
        engine.step()
        engine.check()
        most = max(most, engine._swap.held)
        assert all(bool(r.kept) <= (r in engine.scheduler.waiting) for r in engine._requests.values())
    assert 0 < most <= 12
    assert engine.stats().preemptions > 2


def test_a_request_that_ends_while_it_waits_leaves_no_copy() -> None:
    engine = make(0, Recorder(40), preemption="swap")
    for job in JOBS:
        engine.add(a_request(*job))
    while not engine._swap.held:
        engine.step()
    waiting = [r for r in engine.scheduler.waiting if r.kept]
    assert waiting
    engine.abort([r.id for r in waiting])
    assert (engine._swap.held, [r.kept for r in waiting]) == (0, [0] * len(waiting))
    drain(engine)


def test_a_model_answers_the_same(tmp_path: Path) -> None:
    """On the torch backend, in fp32, greedy and by seed: ids equal recompute's."""
    model = tiny.write_gguf(tmp_path / "tiny.gguf", "llama")
    prompts = [f"request {i} asks for much memory" * 2 for i in range(4)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=60, ignore_eos=True) for i in range(4)]
    got = {}
    for preemption, blocks in (("recompute", 129), ("recompute", 18), ("swap", 18)):
        with LLM(str(model), dtype="fp32", threads=1, kv_blocks=blocks, max_num_seqs=4, preemption=preemption) as llm:
            got[preemption, blocks] = [a.token_ids for a in llm.generate(prompts, params)]
            stats = llm.engine.stats()
            assert (stats.preemptions > 0) == (blocks == 18)
            assert (stats.swapped_in > 0) == (preemption == "swap")
    assert len({str(answers) for answers in got.values()}) == 1
