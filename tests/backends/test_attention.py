"""Paged attention against attention written out over dense keys, in float64: alone, and with the plan of a step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cutaway.backends.torch import gather
from cutaway.backends.torch.attention import paged_attention, write_kv
from cutaway.backends.torch.gather import prepare


def dense(q, k, v, scale, window=0):
    """q [n, heads, dim], the last of a context k, v [context, kv_heads, dim]."""
    n, heads, _ = q.shape
    context, kv_heads, _ = k.shape
    out = np.zeros(q.shape)
    for i in range(n):
        last = context - n + i
        first = max(0, last - window + 1) if window else 0
        for h in range(heads):
            keys, values = k[first : last + 1, h // (heads // kv_heads)], v[first : last + 1, h // (heads // kv_heads)]
            scores = keys @ q[i, h] * scale
            weights = np.exp(scores - scores.max())
            out[i, h] = weights / weights.sum() @ values
    return out


@pytest.fixture(params=["alone", "planned"], autouse=True)
def way(request, monkeypatch):
    """Whether `Case.run` prepares a plan where a test gives none."""
    monkeypatch.setattr(Case, "planned", request.param == "planned")


class Case:
    """Rows (queries, context) over a pool in shuffled order; all that is nobody's context holds `junk`."""

    planned = False

    def __init__(self, rows, heads=4, kv_heads=2, dim=8, block_size=16, junk=math.nan, dtype=torch.float32, seed=0):
        rng = np.random.default_rng(seed)
        needed = [-(-context // block_size) for _, context in rows]
        blocks = sum(needed) + 3
        ids = list(rng.permutation(np.arange(1, blocks)))
        self.shape = (blocks, kv_heads, block_size, dim)
        self.k_cache, self.v_cache = torch.full(self.shape, junk, dtype=dtype), torch.full(self.shape, junk, dtype=dtype)
        self.tables = np.full((len(rows), max(needed) + 1), blocks - 1, np.int32)  # past a row's blocks: any block at all
        self.contexts = np.array([context for _, context in rows], np.int32)
        self.starts = np.concatenate([[0], np.cumsum([n for n, _ in rows])]).astype(np.int32)
        self.q = torch.from_numpy(rng.standard_normal((int(self.starts[-1]), heads, dim))).to(dtype)
        self.dense = []
        for row, (_, context) in enumerate(rows):
            self.tables[row, : needed[row]] = [ids.pop() for _ in range(needed[row])]
            k, v = (torch.from_numpy(rng.standard_normal((context, kv_heads, dim))).to(dtype) for _ in range(2))
            at = np.arange(context)
            slots = torch.from_numpy(self.tables[row, at // block_size].astype(np.int64) * block_size + at % block_size)
            write_kv(self.k_cache, self.v_cache, k, v, slots)
            self.dense.append((k.double().numpy(), v.double().numpy()))

    def run(self, **extras):
        tables, contexts, starts = (torch.from_numpy(x) for x in (self.tables, self.contexts, self.starts))
        if self.planned and "plan" not in extras:
            extras["plan"] = prepare(tables, contexts, starts, self.k_cache)
        out = paged_attention(self.q, self.k_cache, self.v_cache, tables, contexts, starts, scale=0.3, **extras)
        assert out.shape == self.q.shape and out.dtype == self.q.dtype
        return out.double().numpy()

    def expected(self, window=0):
        rows = zip(self.starts[:-1], self.starts[1:], self.dense, strict=True)
        return np.concatenate([dense(self.q[a:b].double().numpy(), k, v, 0.3, window) for a, b, (k, v) in rows])


MIXED = [(1, 1), (1, 16), (5, 5), (1, 17), (3, 40), (17, 33), (1, 31), (16, 48), (3, 3)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (9, 3), (8, 1)])
def test_ragged_rows_of_every_kind(heads, kv_heads):
    case = Case(MIXED, heads, kv_heads)
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 31, 32, 33, 64])
def test_around_block_boundaries(block_size, context):
    for queries in {1, min(2, context), context}:
        case = Case([(queries, context)], block_size=block_size)
        np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 3e38])
def test_what_lies_past_a_context_never_reaches_the_output(junk):
    case = Case([(1, 3), (1, 50), (4, 21), (1, 18)], junk=junk)
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)


@pytest.mark.parametrize("window", [1, 2, 7, 16, 30, 1000])
def test_sliding_window(window):
    case = Case(MIXED)
    np.testing.assert_allclose(case.run(window=window), case.expected(window), atol=2e-6)


def test_long_prompts_go_piece_by_piece(monkeypatch):
    monkeypatch.setattr(gather, "PIECE", 32)
    case = Case([(100, 100), (64, 90), (33, 200), (1, 7)])
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)
    np.testing.assert_allclose(case.run(window=20), case.expected(20), atol=2e-6)


def test_very_different_lengths_are_gathered_apart(monkeypatch):
    monkeypatch.setattr(gather, "PADDING", 40)
    case = Case([(1, 300), (1, 5), (1, 290), (1, 9), (1, 100), (1, 1)])
    tables, contexts, starts = (torch.from_numpy(x) for x in (case.tables, case.contexts, case.starts))
    groups = prepare(tables, contexts, starts, case.k_cache).groups
    assert sorted(sorted(g.lengths.tolist()) for g in groups) == [[1, 5, 9], [100], [290, 300]]
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)


def test_one_preparation_serves_every_layer_and_every_window():
    case = Case(MIXED, junk=1e4)  # the engine's pool is finite, and it says so
    tables, contexts, starts = (torch.from_numpy(x) for x in (case.tables, case.contexts, case.starts))
    plan = prepare(tables, contexts, starts, case.k_cache, finite=True)
    for window in (0, 7, 0, 30, 7):
        np.testing.assert_allclose(case.run(window=window, plan=plan), case.expected(window), atol=2e-6)


def test_bf16_is_as_close_as_its_numbers_are():
    case = Case(MIXED, heads=9, kv_heads=3, dim=64, dtype=torch.bfloat16)
    np.testing.assert_allclose(case.run(), case.expected(), atol=0.03)


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("first", [3, 1])
def test_heads_first_and_consecutive_blocks_change_nothing(first, finite):
    """The layout that "head_first" asks for, where a row's keys are read in place; `first`: with and without a gap."""
    for queries, window in [(1, 0), (1, 7), (5, 0), (50, 0), (50, 20)]:
        case = Case([(queries, 50)], heads=6, junk=1e4 if finite else math.nan)
        blocks = np.array([first, 4, 5, 6])
        k, v = (c[case.tables[0, :4]] for c in (case.k_cache, case.v_cache))
        for name, held in (("k_cache", k), ("v_cache", v)):
            cache = torch.full((2, 9, 16, 8), 1e4 if finite else math.nan).transpose(0, 1)
            cache[blocks] = held
            setattr(case, name, cache)
        case.tables[0, :4] = blocks
        before = case.k_cache.clone(), case.v_cache.clone()
        args = (torch.from_numpy(x) for x in (case.tables, case.contexts, case.starts))
        plan = prepare(*args, case.k_cache, finite=finite)
        assert all((group.run is None) == (first == 1 or queries > gather.SMALL) for group in plan.groups)
        np.testing.assert_allclose(case.run(window=window, plan=plan), case.expected(window), atol=2e-6)
        assert torch.equal(before[0].nan_to_num(), case.k_cache.nan_to_num())
        assert torch.equal(before[1].nan_to_num(), case.v_cache.nan_to_num())


@pytest.mark.parametrize("slots", [[7, 16, 4], [7]])
@pytest.mark.parametrize("head_first", [False, True])
def test_write_kv_writes_its_slots_and_nothing_else(slots, head_first):
    shape = (5, 2, 4, 3)
    k_cache, v_cache = torch.full(shape, 9.0), torch.full(shape, 9.0)
    if head_first:
        k_cache, v_cache = (c.transpose(0, 1).contiguous().transpose(0, 1) for c in (k_cache, v_cache))
    k, v = torch.arange(18.0).view(3, 2, 3)[: len(slots)], -torch.arange(18.0).view(3, 2, 3)[: len(slots)]
    slots = torch.tensor(slots, dtype=torch.int32)
    rows = torch.zeros(len(slots) + 1, dtype=torch.int32)
    plan = prepare(rows[1:, None], rows[1:] + 1, rows, k_cache, slots=slots) if Case.planned else None
    write_kv(k_cache, v_cache, k, v, slots, plan=plan)
    expected_k, expected_v = torch.full(shape, 9.0), torch.full(shape, 9.0)
    for token, slot in enumerate(slots.tolist()):
        expected_k[slot // 4, :, slot % 4], expected_v[slot // 4, :, slot % 4] = k[token], v[token]
    assert torch.equal(k_cache, expected_k) and torch.equal(v_cache, expected_v)
