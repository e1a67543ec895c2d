"""Stage 09: who holds which block, and what of it is worth keeping. Blocks, copies and computed positions are counted; the
engine's own figures are compared with and without the learner's cache."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

from course.given.rig import fake_engine, request, run
from course.runner.checking import Lab, check
from course.stages.s09_prefix.helpers import (
    SIZE,
    answers,
    cache_of,
    counted,
    counts,
    digests,
    engine_with,
    eviction_does_not_search,
    hashes_of,
    prompt,
    published,
    refused,
    same_in_another_process,
    short,
    told_apart,
)

from cutaway.core.blocks import BlockAllocator, OutOfBlocks

STEPS = 3000  # of the fuzz
USERS = 9


@check(gate="= 240", unit="of 240", probably="a block is hashed by its own tokens alone, without all that came before it")
def hashes_are_chained(lab: Lab) -> None:
    """one hash for each different beginning"""
    parts = ([7, 7], [1, 23], [12, 3])
    found: set[bytes] = set()
    for space in (b"", b"tenant"):
        for length in range(1, 5):
            for beginning in product(parts, repeat=length):
                tokens = [token for part in beginning for token in part]
                found.add(hashes_of(lab, tokens, 2, space)[-1])
    told_apart(lab)
    least = min(map(len, found))
    lab.expect(least >= 16, "a hash is too short: a collision gives one user another's context", f"{least} bytes, not 16")
    tokens = prompt(1, 96)
    whole = lab.app.chain(tokens, SIZE)
    same_in_another_process(lab, tokens, whole)
    rest = lab.app.chain(tokens[32:], SIZE, whole[1])
    lab.expect(rest == whole[2:], "the namespace has to be the first block's parent as it is: the engine continues a chain so",
               f"a chain that goes on from its second hash: yours {short(rest)}, expected {short(whole[2:])}")  # fmt: skip
    large = {lab.app.chain([token], 1)[0] for token in (1, 257, 65537, 2**31 - 1)}
    lab.equal(len(large), 4, "different hashes of the tokens 1, 257, 65537 and 2147483647", "ids are cut to a byte or two")
    lab.measure(len(found), detail="all sequences of 1 to 4 blocks out of 3, in 2 namespaces, among them 1, 23 and 12, 3")


@check(gate="= 0", unit="of 400", probably="the partial block at the end is hashed, too")
def full_blocks_only(lab: Lab) -> None:
    """only full blocks have a hash"""
    wrong, seen = 0, ""
    for size in (SIZE, 5):
        tokens = prompt(2, 200)
        whole = lab.app.chain(tokens, size)
        lab.equal(len(whole), 200 // size, f"hashes of 200 tokens in blocks of {size}",
                  "a block that is exactly full has no hash" if len(whole) < 200 // size else "")  # fmt: skip
        for length in range(200):
            got = lab.app.chain(tokens[:length], size)
            if got != whole[: length // size]:
                wrong += 1
                seen = seen or f"{length} tokens, blocks of {size}: {len(got)} hashes, expected {length // size}"
    lab.measure(wrong, detail=seen or "the hashes change with tokens behind their block")


@check(gate="= 0", unit="hits", probably="a block is found before it was published, or with publish=False")
def nothing_unpublished_is_found(lab: Lab) -> None:
    """nothing is found that is not published"""
    names = digests(6)
    cache = cache_of(lab, 8)
    held = cache.allocate(6)
    hits = len(cache.lookup(names))
    for block, digest in zip(held[:3], names[:3], strict=True):
        lab.equal(cache.publish(block, digest), block, "the block that stands for a digest published for the first time")
    cache.release(reversed(held))
    counted(lab, cache, (8, 3, 0), "after 3 published and 3 other blocks were released")
    hits += len(cache.lookup(names[3:]))
    off = cache_of(lab, 8, publish=False)
    held = published(off, names)
    hits += len(off.lookup(names))
    off.release(held)
    hits += len(off.lookup(names))
    counted(lab, off, (8, 0, 0), "with publish=False after all were released")
    engine = engine_with(lab, 65, chunk=32, budget=48)  # a prompt of 96 comes in slices, and an equal one a step later
    first, second = request(0, prompt(3, 96), max_tokens=4), request(1, prompt(3, 96), max_tokens=4)
    for arrived in (first, second):
        engine.add(arrived)
        engine.step()
    lab.equal(second.num_cached, 32, "tokens found by the second, when 32 of the first were computed and 32 planned")
    lab.measure(hits)


@check(gate="= 8", unit="blocks", probably="each user gets a copy, or the first who leaves takes the block along")
def one_copy_for_all(lab: Lab) -> None:
    """blocks that nine users hold"""
    names = digests(8)
    cache = cache_of(lab, 20)
    blocks = published(cache, names)
    for user in range(1, USERS):
        if user % 2:
            lab.equal(cache.lookup(names), blocks, "the blocks that a further user finds")
        else:
            cache.fork(iter(blocks))
    used = cache.num_used
    lab.equal(counts(cache)[:2], (20 - used, 0), "(num_free, num_cached) while they are held")
    for left in range(USERS, 0, -1):
        lab.equal(cache.num_used, 8, f"blocks in use with {left} users left", "the first user who leaves takes the block along")
        cache.release(reversed(blocks))
    counted(lab, cache, (20, 8, 0), "when all have left")
    for block in (blocks[0], 20):  # one is cached, one free
        refused(lab, cache, block, names[0])
    counted(lab, cache, (20, 8, 0), "after the refusals")
    lab.measure(used, baseline=8 * USERS, detail=f"{USERS} users with the same 8 blocks")


@check(gate="= 3", unit="blocks", probably="lookup goes on behind the first hash that it does not know")
def lookup_stops_at_a_miss(lab: Lab) -> None:
    """a lookup ends at the first miss"""
    names = digests(8)
    cache = cache_of(lab, 12)
    blocks = published(cache, [*names[:3], *names[4:7]])  # the fourth is not there
    cache.release(reversed(blocks))
    got = cache.lookup(names)
    lab.equal(list(got[:3]), blocks[:3], "the first blocks found")
    lab.equal(list(cache.lookup([names[7], *names[:3]])), [], "blocks found behind an unknown first hash")
    lab.equal(list(cache.lookup([])), [], "blocks found for no hash")
    lab.measure(len(got))
    counted(lab, cache, (9, 3, 3), "after it")


@check(gate="= 0", unit="lost", probably="lookup takes no reference, and the next allocate evicts what it found")
def lookup_takes_a_reference(lab: Lab) -> None:
    """what a lookup found stays"""
    names = digests(6)
    cache = cache_of(lab, 10)
    blocks = published(cache, names)
    cache.release(reversed(blocks))
    found = list(cache.lookup(names[:4]))
    lab.equal(cache.num_free, 6, "num_free while 4 of 10 blocks are held by a lookup")
    others: list[int] = []
    for _ in range(20):  # everybody else takes all that there is
        try:
            others += cache.allocate(1)
        except OutOfBlocks:
            break
    else:
        lab.expect(False, "allocate has to raise OutOfBlocks when nothing is left", f"a pool of 10 gave {len(others)} more")
    lost = len(set(found) & set(others))
    cache.release(others)
    lab.measure(lost, detail=f"found {found}, then handed out {others}")
    lab.equal(list(cache.lookup(names[:4])), found, "the same lookup again")
    cache.release(found)
    cache.release(found)
    counted(lab, cache, (10, 4, 0), "after both lookups were given back")


@check(gate="= 0", unit="stale hits", probably="an evicted block keeps its digest, and holds another's tokens")
def evicted_is_a_miss(lab: Lab) -> None:
    """a hit after eviction is a miss"""
    cache = cache_of(lab, 6)
    stale = 0
    for turn in range(20):
        names = digests(6, seed=turn)
        blocks = published(cache, names)
        counted(lab, cache, (0, 0, 6), "with the whole pool held")
        cache.release(reversed(blocks))
        counted(lab, cache, (6, 6, 0), "with the whole pool cached")
        again = cache.allocate(6)
        for digest in names:
            found = cache.lookup([digest])
            stale += len(found)
            cache.release(found)
        cache.release(again)
        counted(lab, cache, (6, 0, 0), "after blocks that nobody published were released",
                  "a block given to a new holder is still published for its old content")  # fmt: skip
    lab.measure(stale, detail="digests found after all blocks had been handed out again")


@check(gate="= 12", unit="of 12", probably="the newest goes first, or a hit does not make a block young again")
def least_recently_used_goes_first(lab: Lab) -> None:
    """the least recently used goes first"""
    names = digests(12)
    cache = cache_of(lab, 13)
    blocks = published(cache, names)
    order = list(range(12))
    random.Random(3).shuffle(order)
    for i in order:
        cache.release([blocks[i]])
    for i in (order[0], order[5]):  # these are used again
        cache.release(cache.lookup([names[i]]))
        order.remove(i)
        order.append(i)
    lab.equal(list(cache.allocate(1)), [13], "the block handed out while one is free",
              "a cached block is evicted while a block without content is free")  # fmt: skip
    counted(lab, cache, (12, 12, 1), "after it")
    gone = [blocks.index(cache.allocate(1)[0]) for _ in range(12)]
    agree = sum(a == b for a, b in zip(gone, order, strict=True))
    lab.measure(agree, detail=f"evicted {gone}, least recently used first is {order}")
    cache = cache_of(lab, 3)
    first, *rest = cache.allocate(3)
    table = [*rest, first]  # neither ascending nor descending
    for block, digest in zip(table, names, strict=False):
        cache.publish(block, digest)
    cache.release(reversed(table))
    cache.allocate(2)
    lab.equal(list(cache.lookup(names[:3])), table[:1], f"found of a chain in {table} after 2 evictions",
              "release takes the ids in the order given: a chain's end goes before its head")  # fmt: skip
    eviction_does_not_search(lab)


@check(gate="= 0", unit="evicted", probably="it is evicted before it is known whether that will do")
def out_of_blocks_evicts_none(lab: Lab) -> None:
    """a refused allocation evicts nothing"""
    names = digests(4)
    cache = cache_of(lab, 10)
    blocks = published(cache, names)
    mine = cache.allocate(3)
    cache.release(reversed(blocks))
    counted(lab, cache, (7, 4, 3), "while 4 are cached",
              "num_free has to count the cached blocks, and not to count them twice")  # fmt: skip
    for n in (8, 11, 100):
        lab.raises(OutOfBlocks, lambda n=n: cache.allocate(n), "allocate has to let the allocator's OutOfBlocks through")
    found = cache.lookup(names)
    evicted = 4 - len(found)
    cache.release(reversed(found))
    lab.measure(evicted)
    lab.equal(list(cache.allocate(0)), [], "allocate(0)")
    rest = cache.allocate(7)
    lab.equal(len(set(rest) | set(mine)), 10, "different blocks handed out",
              "num_free promises blocks that allocate does not give")  # fmt: skip
    counted(lab, cache, (0, 0, 10), "with all handed out")


@check(gate="= 10", unit="blocks", probably="a second block is published under the same digest")
def equal_prompts_end_in_one_copy(lab: Lab) -> None:
    """four equal prompts in one step: one copy"""
    name, other = digests(2)
    cache = cache_of(lab, 6)
    one, two, three = cache.allocate(3)
    stands = [cache.publish(block, name) for block in (one, two, one)]
    lab.equal(
        stands, [one, one, one], "the blocks that stand for one digest", "publish has to answer the block that stands already"
    )
    counted(lab, cache, (5 - 1, 0, 2), "after the second was offered",
              "the caller's reference moves to the standing block, and his own goes back")  # fmt: skip
    cache.release([one, one])
    lab.equal(cache.publish(three, name), one, "a third block, offered while the first is cached")
    lab.raises(ValueError, lambda: cache.publish(one, other), "publish has to refuse a block that stands for another digest")
    counted(lab, cache, (5, 0, 1), "after that")
    engine = engine_with(lab, 65)
    for i in range(4):
        engine.add(request(i, prompt(4, 100), max_tokens=8))
    engine.step()
    lab.equal(engine.stats().computed_tokens, 400, "positions computed in the first step: none of them could wait for another")
    lab.measure(engine.cache.num_used, baseline=28, detail="6 full blocks once, and a partial one for each of the four")


@check(gate="= 1", unit="copy", probably="a shared block is written in place, or the last holder copies it again")
def copy_on_write_once(lab: Lab) -> None:
    """a shared block is copied, once"""
    names = digests(2)
    cache = cache_of(lab, 4)
    parent = published(cache, names[:1]) + list(cache.allocate(1))
    cache.fork(parent)
    counted(lab, cache, (2, 0, 2), "after a fork, which takes no block")
    copies, child = 0, list(parent)
    for _ in range(5):  # the child writes five tokens into its last block
        child[1], source = cache.prepare_write(child[1])
        copies += source is not None
        lab.expect(source in (None, parent[1]), "the block to copy from is the one that was shared",
                   f"yours {source}, expected {parent[1]}, or None where nothing is to be copied")  # fmt: skip
    lab.expect(child[1] not in parent, "the child writes into its parent's block")
    lab.equal(cache.prepare_write(parent[1]), (parent[1], None), "the parent's own write, now that it is alone")
    lab.measure(copies, detail="five writes into a block that two tables named")
    counted(lab, cache, (1, 0, 3), "after the copy")
    child[0], source = cache.prepare_write(child[0])
    lab.equal((source, cache.lookup(names[:1])), (parent[0], parent[:1]), "the block to copy from, and what a lookup finds",
              "a shared block that is published stays so: the writer has a copy, which is not")  # fmt: skip
    lab.raises(OutOfBlocks, lambda: cache.prepare_write(parent[0]), "a copy needs a block, and there is none: OutOfBlocks")
    cache.release([parent[0]])
    counted(lab, cache, (0, 0, 4), "after a copy that failed and one release",
              "the reference is given back before it is known that there is a block for the copy")  # fmt: skip
    lab.equal(cache.prepare_write(parent[0]), (parent[0], None), "a published block with one holder, about to be written")
    lab.equal(list(cache.lookup(names[:1])), [], "blocks found for a digest whose block was written into",
              "a published block that is written keeps its digest, which is false from then on")  # fmt: skip
    cache.release([*parent, *child])
    counted(lab, cache, (4, 0, 0), "at the end")


@check(gate="= 0", unit="steps wrong", probably="a reference is lost or counted twice")
def fuzz(lab: Lab) -> None:
    """num_free + num_used = pool, every step"""
    rng = random.Random(5)
    pool, names = 12, digests(30)
    allocator = BlockAllocator(pool + 1, SIZE)
    cache = lab.app.PrefixCache(allocator)
    held: list[int] = []  # one entry a reference
    holds: dict[int, bytes | None] = {}  # what is in each block
    good = 0
    for step in range(STEPS):
        action, i = rng.random(), rng.randrange(len(held)) if held else -1
        if action < 0.3:
            if n := rng.randint(0, min(3, cache.num_free)):
                fresh = list(cache.allocate(n))
                lab.expect(not set(fresh) & set(held), "a block that somebody holds is handed out",
                           f"step {step}: {fresh}, held {held}")  # fmt: skip
                held += fresh
                holds |= dict.fromkeys(fresh)
        elif action < 0.5:
            wanted = rng.sample(names, 3)
            found = list(cache.lookup(wanted))
            lab.equal(short(holds.get(b) for b in found), short(wanted[: len(found)]), f"step {step}: what is in {found}",
                      "a digest stands for a block that holds something else by now")  # fmt: skip
            held += found
        elif i < 0:
            pass
        elif action < 0.7:
            if holds[held[i]] is None:
                digest = rng.choice(names)
                mine, held[i] = held[i], cache.publish(held[i], digest)
                if held[i] == mine:
                    holds[mine] = digest
                lab.equal(short([holds.get(held[i])]), short([digest]), f"step {step}: what is in block {held[i]}, published")
        elif action < 0.76:
            cache.fork([held[i]])
            held.append(held[i])
        elif action < 0.82:
            shared = held.count(held[i]) > 1
            if cache.num_free or not shared:
                before = held[i]
                held[i], source = cache.prepare_write(before)
                lab.equal(source, before if shared else None, f"step {step}: the block to copy from")
                holds[held[i]] = None
        else:
            cache.release([held.pop(i)])
        cache.check()
        users = Counter(held)
        good += cache.num_used == len(users) and cache.num_free == allocator.num_free + cache.num_cached == pool - len(users)
    cache.release(held)
    lab.equal((cache.num_free, cache.num_used), (pool, 0), "(num_free, num_used) when all were released")
    lab.measure(STEPS - good)
    allocator.allocate(1)
    lab.raises(AssertionError, cache.check, "check() notices nothing: a block was taken from the allocator past the cache")


@check(gate="> 70", unit="%", probably="blocks are not kept when their first user leaves, or their hashes differ")
def prefill_saved(lab: Lab) -> None:
    """prefill saved by a shared prompt"""
    system = prompt(6, 256)
    waves = [[system + prompt(7, 20)], [system + prompt(8 + i, 10 + 7 * i) for i in range(8)]]
    told: dict[bool, tuple[dict[int, list[int]], int]] = {}
    for cached in (False, True):
        engine = engine_with(lab, 257, cached)
        ids = answers(engine, waves)
        stats = engine.stats()
        told[cached] = ids, stats.computed_tokens - stats.output_tokens + len(ids)
    want = answers(fake_engine(num_blocks=257), waves)
    for cached, (ids, _) in told.items():
        lab.equal(ids, want, f"ids with the cache {'on' if cached else 'off'}",
                  "a request has read a block that holds something else")  # fmt: skip
    (_, without), (_, positions) = told[False], told[True]
    one = engine_with(lab, 65)
    answers(one, [[prompt(20, 65)]], max_tokens=1)
    before = one.stats().computed_tokens
    run(one, [request(1, prompt(20, 65), max_tokens=1)])
    lab.measure(one.stats().computed_tokens - before, name="positions of a repeated prompt of 65", gate="= 1", unit="position",
                baseline=65, probably="a prompt that was seen before is not found whole")  # fmt: skip
    both = f"{positions:,} prompt positions computed, {without:,} without the cache"
    lab.measure(100 * (1 - positions / without), baseline=0, detail=both)


@check(gate="> 50", unit="%", probably="blocks are freed at release, or evicted while others are free")
def preempted_rows_find_their_blocks(lab: Lab) -> None:
    """recomputation saved after preemption"""
    waves = [[prompt(30 + i, 98 + i % 5) for i in range(10)]]  # two at a time; a pool that ends shortly before they do
    want = answers(fake_engine(num_blocks=257), waves, max_tokens=20)
    least = sum(len(p) + 19 for p in waves[0])
    again: dict[bool, int] = {}
    for cached in (False, True):
        engine = engine_with(lab, 16, cached, rows=2)
        lab.equal(answers(engine, waves, max_tokens=20), want, f"ids in a tiny pool with the cache {'on' if cached else 'off'}",
                  "a request has read a block that holds something else")  # fmt: skip
        stats = engine.stats()
        lab.expect(stats.preemptions, "num_free promises more blocks than there are: nobody had to give way")
        again[cached] = stats.computed_tokens - least
        lab.equal(stats.used, 1, "blocks in use when all have ended, the dummy")
    saved = 100 * (1 - again[True] / again[False])
    lab.measure(saved, baseline=0, detail=f"{again[True]:,} positions computed again, {again[False]:,} without the cache")
