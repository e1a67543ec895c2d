"""The step loop over the fake backend: depth, slots, generations, errors of one request."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

import cutaway.core
from cutaway.core.blocks import BlockTable
from cutaway.core.errors import BadRequest, CutawayError, DoesNotFit
from cutaway.core.plan import Limits
from cutaway.core.prefix_cache import chain
from cutaway.core.request import FinishReason, Output, Request, SamplingParams
from cutaway.engine.engine import Engine
from cutaway.engine.parts import PARTS, Parts
from cutaway.engine.trace import TraceWriter
from looping import LIMITS, POISON, Recorder, a_request, answer, drain, ids, make


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_depth_changes_when_results_come_and_nothing_else(depth: int) -> None:
    engine = make(depth)
    for id in range(6):
        engine.add(a_request(id, length=5 + 3 * id, max_tokens=4 + id))
    outputs = drain(engine)
    for id in range(6):
        assert ids(outputs[id]) == answer(a_request(id, length=5 + 3 * id, max_tokens=4 + id))
        assert [o.finish_reason for o in outputs[id]] == [None] * (3 + id) + [FinishReason.LENGTH]
    assert engine._backend.most_in_flight == depth + 1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nothing_is_scheduled_past_max_tokens(depth: int) -> None:
    engine = make(depth)
    engine.add(a_request(length=6, max_tokens=5))
    drain(engine)
    assert [(p.start[0], p.n_tokens[0]) for p in engine._backend.plans] == [(0, 6), (6, 1), (7, 1), (8, 1), (9, 1)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_id_ends_an_answer_whose_next_step_is_in_flight(depth: int) -> None:
    full = answer(a_request(max_tokens=20))
    stop = full[7]
    assert full.index(stop) == 7
    engine = make(depth)
    engine.add(a_request(max_tokens=20, stop=frozenset({stop})))
    outputs = drain(engine)[0]
    assert ids(outputs) == full[:8]
    assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_reason is None
    assert len(engine._backend.plans) == 8 + depth  # the steps in flight are dropped
    assert engine.stats().used == 1 and engine.stats().output_tokens == 8


def test_stop_reason_names_a_requested_id() -> None:
    full = answer(a_request(max_tokens=20))
    engine = make()
    engine.add(a_request(max_tokens=20, stop=frozenset({full[3], full[9]}), stop_token_ids=[full[3]]))
    assert drain(engine)[0][-1].stop_reason == full[3]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps", range(8))
def test_abort_at_any_step_frees_all_at_once_and_leaves_others_alone(depth: int, steps: int) -> None:
    engine = make(depth, limits=Limits(rows=2, budget=8, chunk=4, window=400, block_size=4))
    for id in range(3):
        engine.add(a_request(id, length=9))
    outputs: list[Output] = []
    for _ in range(steps):
        outputs += engine.step()
    engine.abort([0, 0, 77])
    engine.check()
    assert all(r.id != 0 for r in engine.scheduler.running)
    assert engine.stats().used == 1 + len({b for r in engine.scheduler.running for b in r.table.blocks})
    ended = engine.step()
    if not any(o.id == 0 and o.finish_reason for o in outputs):
        assert Output(0, [], finish_reason=FinishReason.ABORT) in ended
    assert not [o for o in ended if o.id == 0 and o.token_ids]
    rest = drain(engine)
    assert 0 not in rest
    for id in (1, 2):
        assert ids([o for o in (*outputs, *ended, *rest.get(id, [])) if o.id == id]) == answer(a_request(id, length=9))
    engine.abort([0, 1, 2])
    assert not engine.has_work


def test_an_abort_alone_is_reported_by_the_next_step() -> None:
    engine = make()
    engine.add(a_request())
    engine.abort([0])
    assert engine.has_work
    assert engine.step() == [Output(0, [], finish_reason=FinishReason.ABORT)]
    assert not engine.has_work and engine.step() == []


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_slots_are_reused_while_their_last_owner_is_in_flight(depth: int) -> None:
    engine = make(depth, limits=Limits(rows=1, budget=64, chunk=64, window=400, block_size=4))
    full = answer(a_request(0, max_tokens=30))
    engine.add(a_request(0, max_tokens=30, stop=frozenset({full[2]})))
    for id in range(1, 4):
        engine.add(a_request(id))
    outputs = drain(engine)
    assert ids(outputs[0]) == full[:3]
    for id in range(1, 4):
        assert ids(outputs[id]) == answer(a_request(id))
    assert {p.slot[0] for p in engine._backend.plans} == {0}


def test_an_id_can_come_back_after_its_end() -> None:
    engine = make(depth=1)
    engine.add(a_request(0))
    engine.step()
    engine.abort([0])
    engine.add(a_request(0, length=9))  # the same id while the old one is in flight
    outputs = drain(engine)[0]
    assert outputs[0].finish_reason is FinishReason.ABORT
    assert ids(outputs) == answer(a_request(0, length=9))


def test_what_is_refused_at_the_door() -> None:
    engine = make(limits=Limits(rows=2, budget=8, chunk=8, window=50, block_size=4))
    engine.add(a_request(0))
    with pytest.raises(BadRequest, match="there is a request 0 already"):
        engine.add(a_request(0))
    with pytest.raises(BadRequest, match="the prompt has no tokens"):
        engine.add(Request(1, [], SamplingParams(max_tokens=1)))
    with pytest.raises(BadRequest, match="max_tokens is not set"):
        engine.add(Request(1, [1], SamplingParams()))
    for token in (-1, 2**31):
        with pytest.raises(BadRequest, match="token ids must be from 0"):
            engine.add(Request(1, [1, token], SamplingParams(max_tokens=1)))
    with pytest.raises(DoesNotFit, match="46 prompt tokens and 5 to generate"):
        engine.add(a_request(1, length=46))
    assert list(drain(engine)) == [0]
    engine.check()


def test_a_poisoned_row_fails_alone_and_publishes_nothing() -> None:
    engine = make(depth=1)
    engine.add(a_request(0))
    engine.add(
        Request(1, [1, 2, 3, POISON, 5], SamplingParams(temperature=0, max_tokens=5), hashes=chain([1, 2, 3, POISON], 4))
    )
    outputs = drain(engine)
    (failed,) = outputs[1]
    assert failed.finish_reason is FinishReason.ERROR and "not finite" in failed.error and failed.token_ids == []
    assert ids(outputs[0]) == answer(a_request(0))
    assert engine.cache.lookup(chain([1, 2, 3, POISON], 4)) == []


def test_seeds_decide_and_none_draws_one() -> None:
    def sampled(seed: int | None) -> list[int]:
        return answer(a_request(temperature=1.0, seed=seed, max_tokens=12))

    assert sampled(5) == sampled(5) != sampled(6)
    assert sampled(None) != sampled(None)
    assert sampled(2**64 - 1) == sampled(-1)  # as a device's int64 holds them
    assert sampled(-(2**63)) == sampled(2**63)


def test_a_row_does_not_depend_on_its_neighbours_or_its_slot() -> None:
    engine = make(depth=1)
    for id in range(4):
        engine.add(a_request(id, temperature=1.0, seed=40 + id, max_tokens=3 + 4 * id))
    outputs = drain(engine)
    for id in range(4):
        assert ids(outputs[id]) == answer(a_request(id, temperature=1.0, seed=40 + id, max_tokens=3 + 4 * id))


def test_logprobs_reach_those_who_asked() -> None:
    engine = make()
    for id, wanted in enumerate((None, 0, 2, 5)):
        engine.add(a_request(id, logprobs=wanted))
    outputs = drain(engine)
    assert all(o.logprobs is None for o in outputs[0])
    for id, wanted in ((1, 0), (2, 2), (3, 5)):
        for output in outputs[id]:
            (found,) = output.logprobs
            assert len(found.top_ids) == len(found.top) == wanted
            assert found.top_ids[:1] == output.token_ids[: min(1, wanted)]
            assert math.isclose(found.chosen, -1 - output.token_ids[0] / 32000, rel_tol=1e-6)


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_are_shared_too(depth: int) -> None:
    """A second turn finds the blocks of the first one's answer, also after one that a stop id ended."""
    engine = make(depth)
    full = answer(a_request(max_tokens=24))
    engine.add(a_request(max_tokens=24, stop=frozenset({full[14]})))
    said = ids(drain(engine)[0])
    tokens = list(range(6)) + said + [7, 8, 9]
    engine.add(Request(1, list(tokens), SamplingParams(temperature=0, max_tokens=6), hashes=chain(tokens, 4)))
    second = drain(engine)[1]
    assert second[0].num_cached == (6 + len(said) - 1) // 4 * 4
    assert ids(second) == answer(Request(1, list(tokens), SamplingParams(temperature=0, max_tokens=6)))


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("depth", [0, 1])
def test_cold_warm_and_no_cache_give_the_same_ids(length: int, depth: int) -> None:
    def request(id: int) -> Request:
        tokens = list(range(length))
        return Request(id, tokens, SamplingParams(temperature=0, max_tokens=20), hashes=chain(tokens, 4))

    warm = make(depth)
    for id in range(3):
        warm.add(request(id))
        drained = drain(warm)[id]
        assert ids(drained) == answer(request(id))
        assert drained[0].num_cached == (0 if id == 0 else (length - 1) // 4 * 4)
    cold = make(depth, prefix_cache=False)
    cold.add(request(0))
    assert ids(drain(cold)[0]) == answer(request(0))
    assert cold.stats().cached == 0 and cold.stats().free == 100


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("cache", [True, False])
def test_preemption_in_a_tiny_pool_loses_and_repeats_nothing(depth: int, cache: bool) -> None:
    engine = make(depth, backend=Recorder(num_blocks=8, delay=depth), prefix_cache=cache)
    for id in range(4):
        engine.add(a_request(id, length=7, max_tokens=18))
    outputs = drain(engine)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens == 0 and engine.stats().prompt_tokens == 28  # no prompt shares with another
    for id in range(4):
        assert ids(outputs[id]) == answer(a_request(id, length=7, max_tokens=18))


def test_cached_tokens_are_what_the_first_admission_found() -> None:
    """A preempted row that comes back finds its own blocks: the trace tells of them, its usage does not."""
    trace = io.StringIO()
    engine = Engine(Recorder(num_blocks=8), Parts(), LIMITS, trace=TraceWriter(trace))
    for id in range(4):
        engine.add(a_request(id, length=7, max_tokens=18))
    outputs = drain(engine)
    hits = [json.loads(line)["hits"] for line in trace.getvalue().splitlines()]
    assert sum(hits) > 0 and engine.stats().preemptions > 0 and engine.stats().prefix_hit_tokens == 0
    assert {o.num_cached for of_one in outputs.values() for o in of_one} == {0}
    assert engine._hits == {}


def test_a_remapped_block_reaches_the_device_before_it_is_read() -> None:
    """Two equal prompts in one step: the second's blocks are exchanged for the first's, and a third request overwrites them."""
    engine = make(depth=0, backend=Recorder(num_blocks=11))
    for id in range(2):
        engine.add(Request(id, list(range(13)), SamplingParams(temperature=0, max_tokens=8), hashes=chain(list(range(13)), 4)))
    engine.add(a_request(2, length=9, max_tokens=3))
    outputs = drain(engine)
    assert (
        ids(outputs[0]) == ids(outputs[1]) == answer(Request(0, list(range(13)), SamplingParams(temperature=0, max_tokens=8)))
    )
    assert ids(outputs[2]) == answer(a_request(2, length=9, max_tokens=3))
    second = engine._backend.plans[1]
    assert second.block_first[1] == 0 and second.block_offsets[2] - second.block_offsets[1] == 4


def test_stats_add_up() -> None:
    engine = make(backend=Recorder(num_blocks=30))
    assert engine.stats().free == 29 and engine.stats().used == 1
    for id in range(5):
        engine.add(a_request(id))
    engine.step()
    stats = engine.stats()
    assert (stats.step, stats.rows, stats.running, stats.waiting) == (1, 4, 4, 1)
    assert stats.free + stats.cached + stats.used == stats.total == 30
    assert (stats.prompt_tokens, stats.computed_tokens, stats.output_tokens) == (30, 24, 4)
    assert stats.step_seconds > 0
    drain(engine)
    assert engine.stats().output_tokens == 25 and engine.stats().used == 1


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(CutawayError, match="the backend's blocks hold 4 tokens, the limits say 16"):
        Engine(Recorder(), Parts(), Limits())
    for limits, depth in ((Limits(rows=0, block_size=4), 0), (Limits(budget=0, block_size=4), 0), (LIMITS, -1)):
        with pytest.raises(CutawayError, match="at least"):
            Engine(Recorder(), Parts(), limits, depth=depth)


def test_a_scheduler_that_runs_nobody_is_an_error_and_no_hang() -> None:
    engine = make()
    engine.add(a_request())
    engine.scheduler.waiting.clear()
    with pytest.raises(RuntimeError, match="1 requests are left and the scheduler runs none"):
        engine.step()


def test_debug_checks_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_DEBUG", "1")
    engine = make()
    engine.add(a_request())
    engine.step()
    engine._free_slots.pop()
    with pytest.raises(AssertionError, match="slots leaked"):
        engine.step()


@pytest.mark.parametrize("part", ["blocks", "prefix_cache", "scheduler", "chunked"])
def test_a_copy_of_a_part_takes_its_place(part: str, tmp_path: Path) -> None:
    source = Path(PARTS[part].default.replace(".", "/")).name + ".py"
    copy = tmp_path / f"my_{part}.py"
    copy.write_text(Path(cutaway.core.__file__).with_name(source).read_text())
    calls: list[str] = []
    parts = Parts({part: str(copy)}, {part: lambda name, args, kwargs, result: calls.append(name)})
    engine = Engine(Recorder(num_blocks=8), parts, LIMITS, depth=1)
    for id in range(3):
        engine.add(a_request(id, length=7, max_tokens=18))
    outputs = drain(engine)
    assert engine.stats().preemptions > 0 and len(calls) > 10
    for id in range(3):
        assert ids(outputs[id]) == answer(a_request(id, length=7, max_tokens=18))


def test_two_rows_that_share_a_half_written_block_part_with_a_copy() -> None:
    """A forked row goes on with its own tokens; the block that both were about to write is copied on the device first."""
    engine = make()
    engine.add(a_request(0, length=6, temperature=1.0, seed=1, max_tokens=12))
    engine.step()
    (parent,) = engine.scheduler.running
    child = a_request(1, temperature=1.0, seed=2, max_tokens=12)
    child.tokens, child.table, child.computed = list(parent.tokens), BlockTable(4), parent.computed
    child.table.extend(list(parent.table.blocks))
    child.num_published, child.hashes = parent.num_published, list(parent.hashes)
    engine.cache.fork(parent.table.blocks)
    engine._requests[1] = child
    engine.scheduler.running.append(child)
    schedule = engine.scheduler.schedule()
    schedule.admitted.append(child)
    engine.scheduler.schedule, usual = lambda: schedule, engine.scheduler.schedule
    engine.step()
    engine.scheduler.schedule = usual
    assert engine._backend.plans[1].copies == [(2, 3)] and engine._backend.plans[1].num_rows == 2
    drain(engine)
    begun = parent.tokens[:7]
    assert parent.tokens[6:] == answer(a_request(0, length=6, temperature=1.0, seed=1, max_tokens=12))
    again = Request(5, list(begun), SamplingParams(temperature=1.0, seed=2, max_tokens=11))
    assert child.tokens[7:] == answer(again)
    assert child.tokens != parent.tokens


def test_the_wait_for_a_row_is_told_once_and_a_preemption_does_not_change_it() -> None:
    engine = make(limits=Limits(rows=1, budget=64, chunk=64, window=400, block_size=4))
    for id in (0, 1):
        engine.add(a_request(id, max_tokens=3))
    first, second = drain(engine).values()
    assert len({o.queue_seconds for o in first}) == len({o.queue_seconds for o in second}) == 1
    assert 0 <= first[0].queue_seconds < second[0].queue_seconds
