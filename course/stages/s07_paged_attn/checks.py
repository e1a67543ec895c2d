"""Stage 07: every answer is held against attention over keys that lie in a row, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
import torch.nn.functional as F
from course.given.paged import BytesMade, Paged, paged, worst
from course.given.rig import ladder_engine, request, run
from course.given.torch_model import LADDER
from course.runner.checking import Lab, NotMeasured, check
from course.runner.timing import ratio
from torch import Tensor

LENGTHS = (1, 2, 7, 15, 17, 33, 40)


def error(lab: Lab, case: Paged) -> float:
    """Of the answer to a case, the largest difference to the dense one."""
    return case.error(lab, lambda: lab.app.paged_attention(*case.ragged, scale=case.scale))


def equals_dense(lab: Lab, rows: Sequence[tuple[int, int]], heads: int = 4, kv_heads: int = 4, block_size: int = 16) -> None:
    """Measures the largest error over rows of (queries, context), each row in a call of its own."""
    errors = {
        row: error(lab, paged([row], heads=heads, kv_heads=kv_heads, block_size=block_size, device=lab.device)) for row in rows
    }
    queries, context = max(errors, key=lambda row: errors[row])
    lab.measure(max(errors.values()), detail=f"worst with {queries} queries on a context of {context}, blocks of {block_size}")


@check(
    gate="= 0",
    unit="slots",
    probably="block and offset are swapped, or heads and offsets: the cache is [block, kv_head, block_size, dim]",
)
def written_to_their_slots(lab: Lab) -> None:
    """slots that are wrong after a write"""
    shape, slots = (6, 2, 4, 8), [5, 0, 21, 14]
    k_cache, v_cache = (torch.full(shape, 9.0, device=lab.device) for _ in range(2))
    k, v = (torch.randn(len(slots), 2, 8, generator=torch.Generator().manual_seed(i)).to(lab.device) for i in range(2))
    lab.app.write_kv(k_cache, v_cache, k, v, torch.tensor(slots, device=lab.device))
    wrong: list[int] = []
    for slot in range(24):
        token = slots.index(slot) if slot in slots else None
        for cache, new in ((k_cache, k), (v_cache, v)):
            want = 9.0 if token is None else new[token]
            if not bool((cache[slot // 4, :, slot % 4] == want).all()):
                wrong.append(slot)
    if len(wrong) >= 2 * len(slots) and bool((k_cache == 9.0).all()):
        lab.expect(False, "the caches that came in are not the ones that were written: write in place")
    lab.measure(len(wrong), detail=f"of slots {slots}, wrong are {sorted(set(wrong))}, in keys or values")


@check(gate="= 2", unit="slots", probably="the last slot of the last block is taken for one past the end, or -1 for a block")
def the_last_slot(lab: Lab) -> None:
    """slots written: the first and the last"""
    k_cache, v_cache = (torch.zeros(5, 2, 16, 8, device=lab.device) for _ in range(2))
    new = torch.ones(2, 2, 8, device=lab.device)
    lab.app.write_kv(k_cache, v_cache, new, 2 * new, torch.tensor([79, 0], dtype=torch.int32, device=lab.device))
    right = [bool((c[block, :, at] == x).all()) for c, x in ((k_cache, 1), (v_cache, 2)) for block, at in ((4, 15), (0, 0))]
    places = ("keys of slot 79", "keys of slot 0", "values of slot 79", "values of slot 0")
    wrong = [place for place, is_right in zip(places, right, strict=True) if not is_right]
    last_alone = all("79" in place for place in wrong)
    lab.expect(
        not wrong,
        "" if last_alone else "a token's numbers are not at [block, :, offset] of its slot, or not in the cache they belong to",
        f"wrong: {', '.join(wrong)}",
    )
    lab.measure(int((k_cache != 0).any(3).all(1).sum()), detail=f"{int((k_cache != 0).sum())} numbers changed, 32 were given")


@check(
    gate="< 1e-5", probably="with one token a block the table holds one id for each token: nothing may be taken for a run of 16"
)
def one_token_a_block(lab: Lab) -> None:
    """error to dense, one token a block"""
    equals_dense(lab, [(1, n) for n in LENGTHS], block_size=1)


@check(gate="< 1e-5", probably="blocks are read in the pool's order, not in the table's")
def shuffled_blocks(lab: Lab) -> None:
    """error to dense, blocks in any order"""
    for block_size in (4, 16):
        equals_dense(lab, [(1, n) for n in LENGTHS], block_size=block_size)


@check(gate="< 1e-5", probably="a context that fills its last block exactly takes one block more, or one less")
def a_multiple_of_the_block(lab: Lab) -> None:
    """error to dense, 16, 32 and 64 tokens"""
    equals_dense(lab, [(1, 16), (1, 32), (1, 64), (32, 32)])


@check(gate="< 1e-5", probably="the last block holds one token, and is left out or read whole")
def length_129(lab: Lab) -> None:
    """error to dense, 8 blocks and one token"""
    equals_dense(lab, [(1, 129), (129, 129)])


@check(
    gate="< 1e-5",
    probably="keys are repeated in turn (0 1 0 1) instead of side by side (0 0 1 1): head h uses key head h // group",
)
def four_heads_on_one(lab: Lab) -> None:
    """error to dense, 4 heads on 1 key head"""
    equals_dense(lab, [(1, 33), (1, 17)], heads=4, kv_heads=1)


@check(
    gate="< 1e-5",
    probably="keys are repeated in turn (0 1 0 1) instead of side by side (0 0 1 1): head h uses key head h // group",
)
def eight_heads_on_two(lab: Lab) -> None:
    """error to dense, 8 heads on 2 key heads"""
    equals_dense(lab, [(1, 33), (1, 17)], heads=8, kv_heads=2)


@check(gate="< 1e-5", probably="every row is cut at the longest row's length, or at the first row's")
def ragged_rows(lab: Lab) -> None:
    """error to dense, 8 rows of 1 to 40 tokens"""
    lengths = (40, 1, 17, 32, 16, 3, 31, 9)
    lab.measure(error(lab, paged([(1, n) for n in lengths], device=lab.device)), detail=f"contexts {lengths}")


@check(
    gate="< 1e-5",
    probably="queries of a prompt see the tokens after them: the last row of a prefill sees all, and hides it",
)
def a_prompt_is_causal(lab: Lab) -> None:
    """error to dense, whole prompts"""
    equals_dense(lab, [(n, n) for n in (2, 7, 16, 33)])


@check(gate="< 1e-5", probably="the causal mask begins at the first key: a chunk's queries are the *last* n of its context")
def a_chunk_in_the_middle(lab: Lab) -> None:
    """error to dense, chunks after a context"""
    equals_dense(lab, [(2, 40), (5, 33), (16, 48), (13, 17)])


@check(gate="< 1e-5", probably="queries are given to rows by count, not by query_starts")
def mixed_rows(lab: Lab) -> None:
    """error to dense, prompts beside decode"""
    rows = [(1, 30), (5, 5), (1, 17), (16, 48), (33, 33), (1, 1), (3, 64)]
    lab.measure(error(lab, paged(rows, heads=4, kv_heads=2, device=lab.device)), detail=f"rows of (queries, context): {rows}")


@check(
    gate="= 0",
    unit="numbers",
    probably="a weight of 0 times NaN is NaN: what lies past the context must be cut off, not masked",
)
def junk_past_the_context(lab: Lab) -> None:
    """numbers that junk past a context moves"""
    rows = [(1, 3), (4, 21), (1, 17), (1, 48)]
    moved, told = 0, ""
    clean = [paged(rows, kv_heads=2, device=lab.device, junk=junk) for junk in (0.0, float("nan"), float("inf"), 999.0)]
    want = clean[0].answer(lab, lambda: lab.app.paged_attention(*clean[0].ragged, scale=clean[0].scale))
    for case, junk in zip(clean[1:], ("NaN", "inf", "999"), strict=True):
        got = case.answer(lab, lambda case=case: lab.app.paged_attention(*case.ragged, scale=case.scale))
        differ = int((~((got - want).abs() < 1e-6)).sum())
        moved, told = moved + differ, told or (f"{differ} of {got.numel()} with {junk} in the blocks" if differ else "")
    lab.measure(moved, detail=told)


@check(gate="< 1e-6", probably="an answer depends on where in the pool a block happens to lie")
def two_physical_orders(lab: Lab) -> None:
    """difference between two orders of blocks"""
    rows, answers, orders = [(1, 50), (9, 33), (1, 16)], [], []
    for spare in (0, 7):
        case = paged(rows, kv_heads=2, device=lab.device, spare=spare)
        answers.append(case.answer(lab, lambda case=case: lab.app.paged_attention(*case.ragged, scale=case.scale)))
        orders.append(case.block_tables[0, :4].tolist())
    lab.expect(bool((answers[0] != 0).any()), "the answer is nothing but zeros")
    lab.measure(worst((answers[0] - answers[1]).abs()), detail=f"the first row's blocks: {orders[0]} and {orders[1]}")


@check(
    gate="< 1e-6", probably="weights do not sum to one: the softmax runs over the wrong axis, or over keys that are then hidden"
)
def values_of_one(lab: Lab) -> None:
    """distance from 1 where all values are 1"""
    case = paged([(1, 21), (7, 21), (1, 16)], kv_heads=2, device=lab.device)
    for value in case.values:
        value.fill_(1.0)
    case.v_cache[~case.v_cache.isnan()] = 1.0
    got = case.answer(lab, lambda: lab.app.paged_attention(*case.ragged, scale=case.scale))
    lab.measure(worst((got - 1.0).abs()))


@check(gate="< 1e-5", probably="the scale that is given is not used: 1 / sqrt(dim) is right for most models and not for all")
def the_scale_that_is_given(lab: Lab) -> None:
    """error to dense, scale 0.4 at dim 16"""
    case = paged([(1, 33), (5, 20)], device=lab.device)
    case.scale = 0.4
    lab.measure(error(lab, case))


@check(gate="= 0", unit="bytes", probably="whole table rows or the whole pool are gathered, and cut or masked afterwards")
def work_follows_the_context(lab: Lab) -> None:
    """bytes more, in a pool 8 times the size"""
    rows, made = [(1, 40), (5, 17), (1, 100)], []
    for spare, wider in ((0, 2), (100, 60)):
        case = paged(rows, kv_heads=2, device=lab.device, spare=spare, wider=wider)
        with BytesMade() as count:
            case.answer(lab, lambda case=case: lab.app.paged_attention(*case.ragged, scale=case.scale))
        made.append(count.total)
    told = (
        f"{made[0]:,} bytes for {case.kv_bytes:,} bytes of keys and values, {made[1]:,} with 100 blocks more and wider tables"
    )
    lab.expect(made[0] > 0, "no tensor came of the call")
    lab.measure(made[1] - made[0], detail=told)
    lab.measure(made[0] / case.kv_bytes, name="bytes made for each of keys and values", unit="x", gate="< 16", detail=told,
                probably="keys are gathered once for every query or head, not once for a row")  # fmt: skip


def contiguous(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of one query a row over keys that lie in a row."""
    group = q.shape[1] // k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    q = q.unflatten(1, (k.shape[1], group))  # heads that share a key head are queries beside each other: no key is repeated
    return F.scaled_dot_product_attention(q, k, v, scale=scale).flatten(1, 2)


@check(
    unit="x",
    probably="not the same two things are timed: layout and write belong before the clock, the gather inside",
    seconds=120,
)
def slow_down_is_reported(lab: Lab) -> None:
    """paged against contiguous, time"""
    # tensors of under 128 KB: larger ones may cost page faults, once more for one side than for the other
    case = paged([(1, 128)] * 8, heads=4, kv_heads=2, dim=64, device=lab.device)
    k, v = torch.stack(case.keys), torch.stack(case.values)

    def reported() -> float:
        return float(lab.app.slowdown(contiguous, case.q, k, v, 16, scale=case.scale))

    yours = [reported()]
    ours = ratio(lambda: lab.app.paged_attention(*case.ragged, scale=case.scale),
                 lambda: contiguous(case.q, k, v, case.scale), lambda low, high: high < 1.1 * low, lab.device)  # fmt: skip
    yours += [reported(), reported()]
    told = f"yours {', '.join(f'{each:.2f}' for each in yours)} x; ours {ours.told}"
    lab.measure(ours.median, detail=told)
    upside_down = ours.median > 1.5 and abs(median(yours) * ours.median - 1.0) < 0.5
    lab.expect(not upside_down, "the ratio is upside down: it is paged / contiguous", told)
    off = abs(median(yours) / ours.median - 1.0)
    if off >= 0.25 and any(0.75 * ours.low <= each <= 1.25 * ours.high for each in yours):
        raise NotMeasured(f"machine busy: {told}", busy=True)
    lab.measure(off, name="your slow-down against it, off by", gate="< 0.25", detail=told)


@check(
    gate="= 0",
    unit="ids",
    probably="right alone and wrong in a step: the engine mixes prompts, chunks and decode in one call",
    seconds=120,
)
def the_engine_answers_the_same(lab: Lab) -> None:
    """ids that differ in the real engine"""
    generator, answers = torch.Generator().manual_seed(0), []
    prompts = [torch.randint(0, LADDER.vocab_size, (n,), generator=generator).tolist() for n in (1, 16, 33, 75)]
    for parts in ({}, {"attention": lab.app}):
        asked = [request(i, prompt, max_tokens=12) for i, prompt in enumerate(prompts)]
        steps = run(ladder_engine(limits={"rows": 4, "budget": 48, "chunk": 32}, **parts), asked)
        answers.append([each.tokens for each in asked])
    wrong = sum(a != b for mine, own in zip(*answers, strict=True) for a, b in zip(mine, own, strict=True))
    lab.measure(wrong, detail=f"{len(prompts)} requests of 12 ids in {steps} steps")
