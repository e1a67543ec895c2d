"""The KV pool: how large it gets, what it costs before it is used, and blocks on their way out and back."""

from __future__ import annotations

import types

import numpy as np
import psutil
import pytest
import torch

from cutaway.backends.torch import kv_cache
from cutaway.backends.torch.kv_cache import KVCache, bytes_per_block, choose_blocks
from cutaway.checkpoints.config import ModelConfig
from cutaway.core.errors import CutawayError
from cutaway.core.plan import Blocks

CONFIG = ModelConfig("llama", 32, 64, 96, 3, 4, 2, 16, 4096)
MIB = 2**20


@pytest.fixture
def free(monkeypatch):
    def set_free(amount):
        monkeypatch.setattr(kv_cache.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=amount))

    return set_free


def test_bytes_of_a_block():
    assert bytes_per_block(CONFIG, 16, torch.bfloat16) == 2 * 3 * 2 * 16 * 16 * 2
    assert bytes_per_block(CONFIG, 16, torch.float32) == 2 * bytes_per_block(CONFIG, 16, torch.bfloat16)


def test_default_is_a_quarter_of_free_memory(free):
    free(400 * MIB)
    assert choose_blocks(None, MIB, 16, 160) == 100


def test_default_is_at_most_sixteen_windows_and_the_dummy(free):
    free(10**6 * MIB)
    assert choose_blocks(None, MIB, 16, 160) == 16 * 10 + 1


def test_default_may_be_less_than_one_window_but_not_nothing(free):
    free(8 * MIB)
    assert choose_blocks(None, MIB, 16, 160) == 2
    free(7 * MIB)
    with pytest.raises(CutawayError, match=r"7 MiB of memory are free.*holds no KV block of 1.0 MiB.*--kv-blocks"):
        choose_blocks(None, MIB, 16, 160)


@pytest.mark.parametrize("asked", [1, 0, -5])
def test_too_few_blocks(free, asked):
    free(100 * MIB)
    with pytest.raises(CutawayError, match=f"--kv-blocks must be at least 2 .*got {asked}$"):
        choose_blocks(asked, MIB, 16, 160)


def test_more_blocks_than_memory(free):
    free(100 * MIB)
    assert choose_blocks(100, MIB, 16, 160) == 100
    with pytest.raises(CutawayError, match=r"^--kv-blocks 101 takes 101 MiB, and 100 MiB are free: at most 100 fit$"):
        choose_blocks(101, MIB, 16, 160)


def test_an_untouched_pool_takes_no_memory():
    before = psutil.Process().memory_info().rss
    cache = KVCache(CONFIG, 100_000, 16, torch.bfloat16)
    assert cache.spec.num_blocks * cache.spec.bytes_per_block > 500 * MIB
    cache.keys[0][1] = 1.0
    assert psutil.Process().memory_info().rss - before < 20 * MIB


def filled(dtype=torch.float32):
    cache = KVCache(CONFIG, 10, 16, dtype)
    cache.pool.copy_(torch.from_numpy(np.random.default_rng(0).standard_normal(cache.pool.shape)))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_first", [False, True])
def test_exported_blocks_come_back_in_other_places(dtype, head_first):
    cache, other = filled(dtype), KVCache(CONFIG, 12, 16, dtype, head_first=head_first)
    assert other.keys[0].is_contiguous() != head_first and other.keys[0].shape == (12, *cache.keys[0].shape[1:])
    blocks = cache.export_blocks([7, 2, 9])
    assert blocks.data.dtype == np.uint8 and blocks.data.shape == (3, cache.spec.bytes_per_block)
    other.import_blocks([1, 11, 4], blocks)
    for theirs, ours in zip([1, 11, 4], [7, 2, 9], strict=True):
        assert torch.equal(other.pool[:, :, theirs], cache.pool[:, :, ours])
    assert not other.pool[:, :, [0, 2, 3, 5, 6, 7, 8, 9, 10]].any()
    first = np.concatenate([t[7].contiguous().view(torch.uint8).numpy().ravel() for t in (cache.keys[0], cache.values[0])])
    assert np.array_equal(blocks.data[0, : first.size], first)


def test_blocks_of_another_shape_or_place_are_refused():
    cache = filled()
    blocks = cache.export_blocks([1, 2])
    with pytest.raises(ValueError, match="this pool takes uint8"):
        cache.import_blocks([1], blocks)
    with pytest.raises(ValueError, match="this pool takes uint8"):
        cache.import_blocks([1, 2], Blocks(blocks.data.view(np.float32)))
    with pytest.raises(ValueError, match="no block 10"):
        cache.export_blocks([10])
    with pytest.raises(ValueError, match="no block -1"):
        cache.import_blocks([-1, 2], blocks)


def test_copies_read_before_they_write():
    cache = filled()
    before = cache.pool.clone()
    cache.copy([(1, 2), (2, 3), (5, 1)])
    for source, destination in [(1, 2), (2, 3), (5, 1)]:
        assert torch.equal(cache.pool[:, :, destination], before[:, :, source])
    assert torch.equal(cache.pool[:, :, [0, 4, 5, 6, 7, 8, 9]], before[:, :, [0, 4, 5, 6, 7, 8, 9]])
