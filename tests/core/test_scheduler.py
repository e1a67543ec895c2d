"""Stage 10: who runs. Directed cases; the random ones are in test_traces.py."""

from __future__ import annotations

import pytest

from cutaway.core.blocks import BlockAllocator, BlockTable
from cutaway.core.chunked import split
from cutaway.core.errors import BadRequest
from cutaway.core.plan import Limits, Schedule
from cutaway.core.prefix_cache import PrefixCache, chain
from cutaway.core.request import DoesNotFit, FinishReason, Request, SamplingParams
from cutaway.core.scheduler import Scheduler


class Desk:
    """A scheduler with blocks of 4 and a pretended device: every row that samples gets the token 7."""

    def __init__(self, usable: int = 8, publish: bool = True, chunked: bool = True, **limits: int):
        self.limits = Limits(**{"rows": 4, "budget": 64, "chunk": 64, "window": 1000, "block_size": 4, **limits})
        self.cache = PrefixCache(BlockAllocator(usable + 1, 4), publish)
        self.scheduler = Scheduler(self.cache, self.limits, split) if chunked else Scheduler(self.cache, self.limits)
        self.ids = 0

    def add(self, prompt: int | list[int], max_tokens: int = 4, stop: int | None = None) -> Request:
        tokens = [100 * self.ids + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        stops = frozenset() if stop is None else frozenset({stop})
        request = Request(self.ids, tokens, SamplingParams(max_tokens=max_tokens), stops, chain(tokens, 4), table=BlockTable(4))
        self.ids += 1
        self.scheduler.add(request)
        return request

    def schedule(self) -> Schedule:
        step = self.scheduler.schedule()
        self.scheduler.check()
        return step

    def apply(self, step: Schedule, token: int = 7) -> list[Request]:
        done = [(r, [token] if start + n >= len(r.tokens) else []) for r, start, n in step.rows if r in self.scheduler.running]
        finished = self.scheduler.apply(done)
        for request, _ in done:
            request.hashes = chain(request.tokens, 4)
        self.scheduler.check()
        return finished

    def step(self, token: int = 7) -> list[tuple[int, int, int]]:
        step = self.schedule()
        self.apply(step, token)
        return [(r.id, start, n) for r, start, n in step.rows]


def test_prefill_and_decode_are_one_thing() -> None:
    desk = Desk()
    request = desk.add(5, max_tokens=3)
    assert desk.step() == [(0, 0, 5)]
    assert desk.step() == [(0, 5, 1)]
    assert desk.step() == [(0, 6, 1)]  # the last token is emitted, never computed
    assert request.finish_reason is FinishReason.LENGTH and request.num_output == 3
    assert desk.step() == []


def test_a_prompt_longer_than_the_budget_goes_in_slices_beside_decodes() -> None:
    desk = Desk(usable=40, budget=10, chunk=8)
    desk.add(3, max_tokens=20)
    assert desk.step() == [(0, 0, 3)]
    desk.add(30)
    assert [desk.step() for _ in range(5)] == [
        [(0, 3, 1), (1, 0, 8)],
        [(0, 4, 1), (1, 8, 8)],
        [(0, 5, 1), (1, 16, 8)],
        [(0, 6, 1), (1, 24, 6)],
        [(0, 7, 1), (1, 30, 1)],
    ]


def test_whole_or_nothing_refuses_what_exceeds_the_budget() -> None:
    desk = Desk(usable=40, budget=10, chunked=False)
    with pytest.raises(DoesNotFit, match=r"12 prompt tokens and 4 to generate: up to 15 tokens in one step, .* budget of 10"):
        desk.add(12)
    desk.add(6)
    desk.add(6)
    assert desk.step() == [(1, 0, 6)]
    assert desk.step() == [(1, 6, 1), (2, 0, 6)]


def test_a_request_that_can_never_fit_is_refused_with_the_figures() -> None:
    desk = Desk(usable=3, window=14)
    with pytest.raises(DoesNotFit, match="10 prompt tokens and 4 to generate need 4 blocks of 4 tokens; the pool has 3"):
        desk.add(10)
    with pytest.raises(DoesNotFit, match="the window 14 tokens") as error:
        desk.add(2, max_tokens=13)
    assert isinstance(error.value, BadRequest) and error.value.code == "context_length_exceeded"
    assert not desk.scheduler.waiting
    desk.add(9)  # 13 tokens, of which 12 are computed: exactly the pool
    while desk.scheduler.running or desk.scheduler.waiting:
        desk.step()
    assert desk.cache.num_free == 3


def test_first_come_first_served() -> None:
    desk = Desk(usable=6)
    desk.add(12, max_tokens=2)
    large = desk.add(16, max_tokens=2)
    small = desk.add(2, max_tokens=2)
    assert desk.step() == [(0, 0, 12)]
    assert list(desk.scheduler.waiting) == [large, small]  # the small one would fit, and does not pass


def test_rows_limit_who_runs() -> None:
    desk = Desk(rows=2)
    for _ in range(3):
        desk.add(2, max_tokens=2)
    assert desk.step() == [(0, 0, 2), (1, 0, 2)]
    assert desk.step() == [(0, 2, 1), (1, 2, 1)]
    assert desk.step() == [(2, 0, 2)]


def test_a_request_enters_with_room_for_one_token_more() -> None:
    desk = Desk(usable=4)
    desk.add(8, max_tokens=2)
    desk.add(4, max_tokens=2)
    desk.step()
    assert [len(r.table.blocks) for r in desk.scheduler.running] == [3]  # 8 and one more; 2 blocks for the other are not there
    desk = Desk(usable=4)
    last = desk.add(8, max_tokens=1)
    desk.schedule()
    assert len(last.table.blocks) == 2  # the one token more is never computed


def preempted() -> tuple[Desk, Request, Request, Schedule]:
    """Two rows fill a pool of 4; the first crosses into a new block."""
    desk = Desk(usable=4)
    first, second = desk.add(7, max_tokens=5), desk.add(7, max_tokens=9)
    assert desk.step() == [(0, 0, 7), (1, 0, 7)]
    assert desk.step() == [(0, 7, 1), (1, 7, 1)]
    return desk, first, second, desk.schedule()


def test_the_last_admitted_gives_way_and_keeps_its_tokens() -> None:
    desk, first, second, step = preempted()
    assert step.preempted == [second] and [r for r, _, _ in step.rows] == [first] and not step.admitted
    assert len(second.tokens) == 9 and second.computed == 0 and second.preemptions == 1 and not second.table.blocks
    assert desk.scheduler.waiting[0] is second


def test_a_preempted_row_waits_at_the_head_until_all_that_it_knows_fits() -> None:
    desk, first, second, step = preempted()
    third = desk.add(2, max_tokens=2)
    desk.apply(step)
    assert list(desk.scheduler.waiting) == [second, third]
    while not first.finish_reason:
        assert [id for id, _, _ in desk.step()] == [0]  # one block is free: not enough for the 9 + 1 tokens
    assert desk.step() == [(1, 4, 5), (2, 0, 2)]  # its first block is still cached; its second, released first, is not
    assert second.num_cached == 4


def test_preempted_rows_come_back_in_the_order_of_arrival() -> None:
    desk = Desk(usable=6)
    rows = [desk.add(5, max_tokens=20) for _ in range(3)]
    order = []
    for _ in range(60):
        step = desk.schedule()
        order += [r.id for r in step.preempted]
        desk.apply(step)
        queue = [r.id for r in (*desk.scheduler.running, *desk.scheduler.waiting)]
        assert queue == sorted(queue)
    assert order[:1] == [2] and 0 not in order
    assert all(r.num_output == 20 for r in rows)


def test_a_row_with_tokens_in_flight_waits_instead_of_preempting_itself() -> None:
    desk = Desk(usable=5)
    desk.add(9, max_tokens=10)
    second = desk.add(7, max_tokens=9)
    steps = [desk.schedule(), desk.schedule()]  # two in flight; the second row's next token would need another block
    assert [[r.id for r, _, _ in step.rows] for step in steps] == [[0, 1], [0, 1]]
    step = desk.schedule()
    assert [r.id for r, _, _ in step.rows] == [0]
    assert not step.preempted and second in desk.scheduler.running and second.in_flight == 2


def test_abort_in_any_state_frees_everything_and_twice_is_nothing() -> None:
    desk = Desk(usable=20, budget=8)
    running, waiting = desk.add(20), desk.add(3)
    desk.schedule()  # the first is in the middle of its prompt, and in flight
    assert running.computed == 8 and waiting.computed == 0
    for id in (0, 0, 1, 1, 99):
        desk.scheduler.abort(id)
        desk.scheduler.check()
    assert desk.cache.num_free == 20 and not running.table.blocks and not desk.scheduler.waiting
    assert not running.in_flight and not running.sent


def test_abort_of_a_preempted_request() -> None:
    desk, _, second, _ = preempted()
    desk.scheduler.abort(second.id)
    desk.scheduler.check()
    assert not desk.scheduler.waiting


def test_tokens_in_flight_count_as_known() -> None:
    desk = Desk()
    request = desk.add(5, max_tokens=3)
    steps = [desk.schedule() for _ in range(3)]
    assert [[(start, n) for _, start, n in step.rows] for step in steps] == [[(0, 5)], [(5, 1)], [(6, 1)]]
    assert request.in_flight == 3 and list(request.sent) == [5, 1, 1]
    assert desk.schedule().rows == []  # nothing is scheduled past max_tokens
    assert [desk.apply(step) for step in steps] == [[], [], [request]]
    assert request.num_output == 3


def test_a_stop_id_ends_the_answer_and_is_its_last_token() -> None:
    desk = Desk()
    request = desk.add(5, max_tokens=10, stop=9)
    desk.step()
    step = desk.schedule()
    assert desk.scheduler.apply([(request, [8, 9, 7, 7])]) == [request]  # what follows it is dropped
    assert request.tokens[5:] == [7, 8, 9] and request.finish_reason is FinishReason.STOP
    assert step.rows and desk.cache.num_used == 0


def test_only_computed_full_blocks_are_published() -> None:
    desk = Desk(usable=20, budget=6)
    request = desk.add(12)
    first = desk.schedule()
    assert desk.cache.lookup(request.hashes) == []  # scheduled is not computed
    desk.apply(first)
    held = desk.cache.lookup(request.hashes)
    assert len(held) == 1  # 6 of 12 tokens: one full block
    desk.cache.release(held)
    desk.scheduler.abort(request.id)
    assert desk.cache.num_cached == 1


def test_what_is_still_in_flight_is_not_published_with_what_came_back() -> None:
    desk = Desk(usable=20, budget=8)
    request = desk.add(20)
    first, second = desk.schedule(), desk.schedule()
    desk.apply(first)
    assert request.computed == 16 and len(desk.cache.lookup(request.hashes)) == 2
    desk.apply(second)
    assert len(desk.cache.lookup(request.hashes)) == 4


def test_an_abort_in_flight_publishes_nothing() -> None:
    desk = Desk()
    request = desk.add(12)
    desk.schedule()
    desk.scheduler.abort(request.id)
    assert desk.cache.num_cached == 0 and desk.cache.lookup(request.hashes) == []


@pytest.mark.parametrize(("length", "hit"), [(7, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12)])
def test_a_hit_leaves_a_token_to_compute(length: int, hit: int) -> None:
    """Prompts of k blocks, one token less and one more: the last token is computed, for its logits."""
    desk = Desk()
    tokens = list(range(13))
    desk.add(tokens, max_tokens=1)
    desk.step()
    again = desk.add(tokens[:length], max_tokens=1)
    assert desk.step() == [(1, hit, length - hit)]
    assert again.num_cached == hit


def test_without_a_cache_nothing_is_found() -> None:
    desk = Desk(publish=False)
    for id in range(2):
        desk.add(list(range(10)), max_tokens=1)
        assert desk.step() == [(id, 0, 10)]
    assert desk.cache.num_cached == 0


def test_identical_prompts_in_one_step_end_with_one_copy() -> None:
    desk = Desk()
    one, two = desk.add(list(range(9))), desk.add(list(range(9)))
    step = desk.schedule()
    assert not set(one.table.blocks) & set(two.table.blocks)
    desk.apply(step)
    assert one.table.blocks[:2] == two.table.blocks[:2] and one.table.blocks[2] != two.table.blocks[2]
    assert desk.cache.num_used == 4


def forked(usable: int) -> tuple[Desk, Request, Request]:
    """Two rows over the same blocks, the second of which is written in part, as a request with n > 1 makes them."""
    desk = Desk(usable=usable)
    parent = desk.add(6, max_tokens=6)
    desk.step()
    child = Request(9, list(parent.tokens), parent.params, table=BlockTable(4), num_prompt=6)
    desk.cache.fork(parent.table.blocks)
    child.table.extend(list(parent.table.blocks))
    child.computed = parent.computed
    desk.scheduler.running.append(child)
    return desk, parent, child


def test_a_row_that_writes_into_a_shared_block_copies_it_first() -> None:
    desk, parent, child = forked(usable=8)
    shared = list(child.table.blocks)
    step = desk.schedule()
    assert step.copies == [(shared[1], parent.table.blocks[1])]
    assert parent.table.blocks[0] == child.table.blocks[0] and child.table.blocks == shared  # the last holder writes in place
    assert parent.table.blocks[1] != shared[1]
    desk.apply(step)
    assert desk.schedule().copies == []


def test_a_copy_without_a_free_block_preempts_the_last_row() -> None:
    desk, parent, child = forked(usable=3)
    desk.cache.allocate(1)  # the pool is full
    step = desk.scheduler.schedule()
    assert step.preempted == [child] and step.copies == []
    assert [r for r, _, _ in step.rows] == [parent] and len(parent.table.blocks) == 2


def test_check_sees_damage() -> None:
    desk = Desk()
    request = desk.add(6)
    desk.step()
    request.computed = 99
    with pytest.raises(AssertionError, match="request 0: computed 99, known 7"):
        desk.scheduler.check()
    request.computed = 6
    request.table.blocks.pop()
    with pytest.raises(AssertionError, match="tables hold 1 blocks, the cache says 2"):
        desk.scheduler.check()
