"""The decode kernel in Triton's interpreter, against the gather attention that is its oracle. No GPU is asked of anyone."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("no triton here: it exists for Linux alone", allow_module_level=True)

import tiny
from cutaway.backends.torch import attention
from cutaway.backends.torch.kernels.paged_decode import choices, paged_decode, splits_for
from cutaway.backends.torch.runner import create
from cutaway.engine.config import EngineConfig
from cutaway.engine.parts import PARTS, Parts
from plans import OTHERS, PROMPT, Hand, alone

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Case:
    """Decode rows over a pool in shuffled order, whose first and last two blocks are nobody's. All that is nobody's context
    is NaN, and past a row's blocks its table points into what is nobody's."""

    def __init__(self, contexts, heads=4, kv_heads=2, dim=16, block_size=16, dtype=FP32, head_first=False):
        generator = torch.Generator().manual_seed(0)
        needed = [-(-context // block_size) for context in contexts]
        pool = sum(needed) + 4
        shape = (kv_heads, pool, block_size, dim) if head_first else (pool, kv_heads, block_size, dim)
        self.k, self.v = (torch.full(shape, math.nan, dtype=dtype) for _ in range(2))
        if head_first:
            self.k, self.v = self.k.transpose(0, 1), self.v.transpose(0, 1)
        ids = (2 + torch.randperm(pool - 4, generator=generator)).tolist()
        self.tables = torch.full((len(contexts), max(needed) + 2), pool - 1, dtype=torch.int32)
        self.contexts = torch.tensor(contexts, dtype=torch.int32)
        self.q = torch.randn(len(contexts), heads, dim, generator=generator).to(dtype)
        for row, context in enumerate(contexts):
            self.tables[row, : needed[row]] = torch.tensor([ids.pop() for _ in range(needed[row])])
            at = torch.arange(context)
            slots = self.tables[row][at // block_size] * block_size + at % block_size
            k, v = (torch.randn(context, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
            attention.write_kv(self.k, self.v, k, v, slots)

    def error(self, **kwargs) -> float:
        """The largest difference to the oracle in fp32."""
        got = paged_decode(self.q, self.k, self.v, self.tables, self.contexts, scale=0.3, **kwargs)
        assert got.shape == self.q.shape and got.dtype == self.q.dtype
        starts = torch.arange(len(self.contexts) + 1, dtype=torch.int32)
        q, k, v = (t.float() for t in (self.q, self.k, self.v))
        window = kwargs.get("window", 0)
        want = attention.paged_attention(q, k, v, self.tables, self.contexts, starts, scale=0.3, window=window)
        return (got.float() - want).abs().max().item()


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_splits", [None, 3])
def test_every_head_size(dim, num_splits):
    assert Case([33, 1, 70], dim=dim).error(num_splits=num_splits) < 1e-5


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_around_block_and_tile_boundaries(block_size):
    assert Case([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129], block_size=block_size).error() < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (9, 3), (8, 1), (20, 1)])
def test_every_group(heads, kv_heads):
    assert Case([19, 80], heads, kv_heads).error() < 1e-5
    assert Case([19, 80], heads, kv_heads).error(num_splits=2) < 1e-5


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 32])
def test_any_number_of_splits(num_splits):
    """Also more than there are tiles: the rest of them are empty."""
    assert Case([1, 64, 65, 300]).error(num_splits=num_splits) < 1e-5


@pytest.mark.parametrize(("dtype", "most"), [(FP32, 1e-5), (FP16, 2e-3), (BF16, 2e-2)])
def test_dtypes_are_as_close_as_their_numbers_are(dtype, most):
    for num_splits in (1, 3):
        assert Case([130, 7], heads=8, dim=64, dtype=dtype).error(num_splits=num_splits) < most


@pytest.mark.parametrize("window", [1, 5, 16, 100])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_sliding_window(window, num_splits):
    assert Case([1, 33, 150]).error(window=window, num_splits=num_splits) < 1e-5


def test_caches_may_be_views_and_queries_part_of_something_wider():
    assert Case([33, 70], head_first=True).error(num_splits=2) < 1e-5
    case = Case([33, 70])
    pool = torch.full((2, *case.k.shape), math.nan)  # keys and values of one tensor
    pool[0], pool[1] = case.k, case.v
    case.k, case.v = pool[0], pool[1]
    wide = torch.randn(2, 7, 16)
    wide[:, 1:5] = case.q
    case.q = wide[:, 1:5]
    assert case.error() < 1e-5


def test_a_row_without_context_is_zeros_and_no_rows_are_none():
    case = Case([5, 9])
    case.contexts[0] = 0
    for num_splits in (1, 2):
        got = paged_decode(case.q, case.k, case.v, case.tables, case.contexts, scale=0.3, num_splits=num_splits)
        assert got[0].abs().max() == 0 and got[1].isfinite().all()
    assert len(paged_decode(case.q[:0], case.k, case.v, case.tables[:0], case.contexts[:0], scale=0.3)) == 0


def test_what_a_card_is_given():
    """A T4 (7, 5) computes no bf16, copies nothing in the background, and has 64 KB of shared memory."""
    for dtype in (FP16, FP32):
        built = choices((7, 5), dtype)
        assert str(built["dot"]) in ("fp16", "fp32") and built["stages"] == 1
    with pytest.raises(ValueError, match="sm_75 does not compute bf16"):
        choices((7, 5), BF16)
    with pytest.raises(ValueError, match="int8"):
        choices((9, 0), torch.int8)
    assert [choices(c, FP16)["stages"] for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [3, 3, 4, 4, 3]
    source = Path(paged_decode.__code__.co_filename).read_text()
    assert not any(word in source for word in ("float8", "fp8", "tensor_descriptor", "warp_specialize"))


def test_splits_fill_the_card_and_no_more():
    assert [splits_for(pairs, 4096, 64, 132) for pairs in (8, 64, 512, 4096)] == [16, 8, 1, 1]
    assert splits_for(8, 200, 64, 132) == 1  # too short to be worth a merge
    assert splits_for(8, 131072, 64, 132) == 32


def test_arguments_that_do_not_fit_are_refused():
    case = Case([5])
    for q, k in ((case.q.half(), case.k), (case.q[:, :3], case.k), (case.q, case.k.transpose(2, 3))):
        with pytest.raises(ValueError, match="caches"):
            paged_decode(q, k, case.v, case.tables, case.contexts, scale=1.0)


def test_the_whole_engine_decodes_through_it(tmp_path):
    """Prompts through the oracle, every decode step through the kernel: ids are those of the oracle alone."""
    folder = tiny.write_folder(tmp_path / "llama", "llama")
    prompts = [*OTHERS, PROMPT]
    expected = [alone(folder, prompt, 6)[0] for prompt in prompts]
    calls = []

    def attend(q, k_cache, v_cache, block_tables, context_lens, query_starts, *, scale):
        if len(q) > len(context_lens):
            return attention.paged_attention(q, k_cache, v_cache, block_tables, context_lens, query_starts, scale=scale)
        calls.append(len(q))
        return paged_decode(q, k_cache, v_cache, block_tables, context_lens, scale=scale)

    parts = Parts()
    module = SimpleNamespace(write_kv=attention.write_kv, paged_attention=attend)
    parts.loaded["attention", PARTS["attention"].default] = module
    hand = Hand(create(EngineConfig(model=str(folder), kv_blocks=64, threads=1, dtype="fp32"), parts))
    rows = [hand.admit(prompt) for prompt in prompts]
    with torch.inference_mode():
        hand.step(*((row, row.pending) for row in rows))
        for _ in range(5):
            hand.step(*((row, 1) for row in rows))
    assert [row.tokens[row.num_prompt :] for row in rows] == expected
    assert calls == [len(rows)] * 5 * 2  # steps, layers
