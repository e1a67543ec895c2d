"""Stage 09: references, hash chains, eviction, copy-on-write."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter

import numpy as np
import pytest

from cutaway.core.blocks import BlockAllocator, OutOfBlocks
from cutaway.core.prefix_cache import PrefixCache, chain

A, B, C, D = (bytes([i]) * 32 for i in range(4))


def a_cache(usable: int = 6, publish: bool = True) -> PrefixCache:
    return PrefixCache(BlockAllocator(usable + 1), publish)


def counts(cache: PrefixCache) -> tuple[int, int, int]:
    cache.check()
    return cache.num_free, cache.num_cached, cache.num_used


def test_chain_is_sha256_over_parent_and_tokens() -> None:
    tokens = list(range(9))
    first = hashlib.sha256(b"" + np.array([0, 1, 2, 3], "<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.array([4, 5, 6, 7], "<i4").tobytes()).digest()
    assert chain(tokens, 4) == [first, second]
    assert chain(tokens[:8], 4) == [first, second]
    assert chain(tokens[:7], 4) == [first]
    assert chain(tokens[:3], 4) == [] and chain([], 4) == []


def test_equal_tokens_behind_different_beginnings_differ() -> None:
    assert chain([1, 2, 9, 9], 2)[1] != chain([1, 3, 9, 9], 2)[1]
    assert chain([9, 9, 9, 9], 2)[0] != chain([9, 9, 9, 9], 2)[1]


def test_a_namespace_keeps_the_whole_chain_apart_and_a_hash_continues_one() -> None:
    tokens = [5, 6, 7, 8, 9, 10]
    plain, tenant = chain(tokens, 2), chain(tokens, 2, b"tenant")
    assert not set(plain) & set(tenant)
    assert chain(tokens[2:], 2, plain[0]) == plain[1:]


def test_large_ids_do_not_collide() -> None:
    assert chain([1], 1) != chain([257], 1) != chain([2**31 - 1], 1)


def test_lookup_answers_the_longest_cached_beginning_and_holds_it() -> None:
    cache = a_cache()
    blocks = cache.allocate(3)
    for block, digest in zip(blocks[:2], (A, B), strict=True):
        assert cache.publish(block, digest) == block
    cache.release(reversed(blocks))
    assert counts(cache) == (6, 2, 0)
    assert cache.lookup([A, B, C]) == blocks[:2]
    assert counts(cache) == (4, 0, 2)
    assert cache.lookup([A, C, B]) == blocks[:1]
    assert cache.lookup([B]) == blocks[1:2]  # a hash stands for the whole beginning
    assert cache.lookup([D]) == [] and cache.lookup([]) == []
    cache.release([blocks[0], blocks[0], blocks[1]])
    assert counts(cache) == (5, 1, 1)


def test_n_users_share_one_copy() -> None:
    cache = a_cache()
    (block,) = cache.allocate(1)
    cache.publish(block, A)
    for _ in range(4):
        assert cache.lookup([A]) == [block]
    assert counts(cache) == (5, 0, 1)
    for left in range(5, 0, -1):
        assert cache.num_used == 1, left
        cache.release([block])
    assert counts(cache) == (6, 1, 0)


def test_unpublished_blocks_go_back_to_the_pool() -> None:
    cache = a_cache()
    cache.release(cache.allocate(4))
    assert counts(cache) == (6, 0, 0)


def test_the_least_recently_used_goes_first_and_is_a_miss_afterwards() -> None:
    cache = a_cache(3)
    blocks = cache.allocate(3)
    for block, digest in zip(blocks, (A, B, C), strict=True):
        cache.publish(block, digest)
        cache.release([block])
    cache.release(cache.lookup([A]))  # used again: B is now the oldest
    assert cache.allocate(1) == [blocks[1]]
    assert cache.lookup([B]) == []
    assert cache.lookup([A]) == [blocks[0]]
    assert cache.allocate(1) == [blocks[2]]
    assert cache.lookup([C]) == []
    assert counts(cache) == (0, 0, 3)


def test_free_blocks_are_taken_before_cached_ones() -> None:
    cache = a_cache(4)
    (block,) = cache.allocate(1)
    cache.publish(block, A)
    cache.release([block])
    assert cache.allocate(3) == [2, 3, 4]
    assert cache.lookup([A]) == [block]


def test_a_table_released_from_its_end_loses_its_end_first() -> None:
    cache = a_cache(3)
    blocks = cache.allocate(3)
    for block, digest in zip(blocks, (A, B, C), strict=True):
        cache.publish(block, digest)
    cache.release(reversed(blocks))
    cache.allocate(1)
    assert cache.lookup([A, B, C]) == blocks[:2]


def test_allocate_is_all_or_nothing_and_evicts_none_in_vain() -> None:
    cache = a_cache(4)
    blocks = cache.allocate(3)
    cache.publish(blocks[0], A)
    cache.release([blocks[0]])
    with pytest.raises(OutOfBlocks):
        cache.allocate(3)
    assert counts(cache) == (2, 1, 2)
    assert cache.lookup([A]) == [blocks[0]]


def test_identical_content_ends_in_one_block() -> None:
    cache = a_cache()
    one, two = cache.allocate(2)
    assert cache.publish(one, A) == one
    assert cache.publish(one, A) == one  # offered again by another holder
    assert cache.publish(two, A) == one
    assert counts(cache) == (5, 0, 1)
    cache.release([one])
    assert cache.num_used == 1
    cache.release([one])
    assert counts(cache) == (6, 1, 0)


def test_identical_content_finds_a_cached_block() -> None:
    cache = a_cache()
    one, two = cache.allocate(2)
    cache.publish(one, A)
    cache.release([one])
    assert cache.publish(two, A) == one
    assert counts(cache) == (5, 0, 1)


def test_a_block_has_one_digest() -> None:
    cache = a_cache()
    (block,) = cache.allocate(1)
    cache.publish(block, A)
    with pytest.raises(ValueError, match="block 1 is published under another digest"):
        cache.publish(block, B)


def test_without_publishing_nothing_is_found() -> None:
    cache = a_cache(publish=False)
    (block,) = cache.allocate(1)
    assert cache.publish(block, A) == block
    assert cache.lookup([A]) == []
    cache.release([block])
    assert counts(cache) == (6, 0, 0)


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    cache = a_cache()
    (block,) = cache.allocate(1)
    cache.fork([block])
    cache.fork([block])
    fresh, source = cache.prepare_write(block)
    assert (fresh, source) == (2, block)
    assert counts(cache) == (4, 0, 2)
    again, source = cache.prepare_write(block)
    assert (again, source) == (3, block)
    assert cache.prepare_write(block) == (block, None)  # the last holder writes in place
    assert counts(cache) == (3, 0, 3)


def test_a_copy_needs_a_block() -> None:
    cache = a_cache(1)
    (block,) = cache.allocate(1)
    cache.fork([block])
    with pytest.raises(OutOfBlocks):
        cache.prepare_write(block)
    cache.release([block])
    assert cache.prepare_write(block) == (block, None)


def test_a_published_block_that_is_written_is_published_no_more() -> None:
    cache = a_cache()
    (block,) = cache.allocate(1)
    cache.publish(block, A)
    assert cache.prepare_write(block) == (block, None)
    assert cache.lookup([A]) == []
    cache.release([block])
    assert counts(cache) == (6, 0, 0)


@pytest.mark.parametrize("call", ["release", "fork", "publish", "prepare_write"])
def test_a_block_that_nobody_holds_is_refused_by_name(call: str) -> None:
    cache = a_cache()
    (block,) = cache.allocate(1)
    cache.publish(block, A)
    cache.release([block])
    for wrong in (block, 3, 0):
        with pytest.raises(ValueError, match=f"block {wrong} is not held by anyone"):
            {"release": lambda b: cache.release([b]), "fork": lambda b: cache.fork([b]),
             "publish": lambda b: cache.publish(b, B), "prepare_write": cache.prepare_write}[call](wrong)  # fmt: skip
    assert counts(cache) == (6, 1, 0)


def test_random_use_keeps_the_invariants() -> None:
    rng = random.Random(3)
    cache, held, digests = a_cache(12), [], [bytes([i]) * 32 for i in range(30)]
    for _ in range(4000):
        action = rng.random()
        if action < 0.3 and cache.num_free:
            held += cache.allocate(rng.randint(1, min(3, cache.num_free)))
        elif action < 0.5:
            held += cache.lookup(rng.sample(digests, 3))
        elif held:
            i = rng.randrange(len(held))
            if action < 0.7 and held[i] not in cache._digest_of:
                held[i] = cache.publish(held[i], rng.choice(digests))
            elif action < 0.75:
                cache.fork([held[i]])
                held.append(held[i])
            elif action < 0.8 and cache.num_free:
                held[i], _ = cache.prepare_write(held[i])
            else:
                cache.release([held.pop(i)])
        cache.check()
        assert cache._refs == Counter(held)
    cache.release(held)
    assert counts(cache)[0] == 12


def test_eviction_costs_the_same_in_a_large_pool() -> None:
    def lines(usable: int) -> int:
        """Lines of Python that one allocation with eviction runs through."""
        cache, count = a_cache(usable), 0
        for i, block in enumerate(cache.allocate(usable)):
            cache.publish(block, i.to_bytes(32, "big"))
            cache.release([block])

        def trace(frame, event, arg):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            cache.allocate(1)
        finally:
            sys.settrace(before)
        return count

    assert lines(20_000) == lines(20) > 5
