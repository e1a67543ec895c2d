"""What the checks of stage 09 share: a cache over a small pool, prompts, and the engine around the learner's cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from course.given.rig import limits_of, parts_with, request, run
from course.runner.checking import Lab

from cutaway.backends.fake import FakeBackend
from cutaway.core.blocks import BlockAllocator
from cutaway.core.request import Output
from cutaway.engine.engine import Engine

SIZE = 16


def digests(n: int, seed: int = 0) -> list[bytes]:
    """So many different digests; the cache does not ask how they were made."""
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(n)]


def cache_of(lab: Lab, blocks: int, publish: bool = True) -> Any:
    """A cache over a fresh pool with so many blocks beside the dummy."""
    return lab.app.PrefixCache(BlockAllocator(blocks + 1, SIZE), publish)


def published(cache: Any, names: Sequence[bytes]) -> list[int]:
    """So many blocks, held once and published in this order."""
    blocks = list(cache.allocate(len(names)))
    for block, digest in zip(blocks, names, strict=True):
        cache.publish(block, digest)
    return blocks


def counts(cache: Any) -> tuple[int, int, int]:
    """(num_free, num_cached, num_used), after the cache's own check."""
    cache.check()
    return cache.num_free, cache.num_cached, cache.num_used


def counted(lab: Lab, cache: Any, want: tuple[int, int, int], when: str, probably: str = "") -> None:
    """num_free, which the cached blocks are part of, num_cached and num_used."""
    got = counts(cache)
    if got != want and got == (want[0] - want[1], *want[1:]):
        probably = "num_free leaves the cached blocks out: a full cache then looks like a full pool, and nobody is admitted"
    lab.equal(got, want, f"(num_free, num_cached, num_used) {when}", probably)


def short(names: Iterable[bytes | None]) -> list[str]:
    """Digests as a person compares them: the first eight digits."""
    return [name.hex()[:8] if name else "nothing" for name in names]


def hashes_of(lab: Lab, tokens: list[int], size: int, space: bytes) -> list[bytes]:
    """The chain of tokens that fill their blocks."""
    hashes = lab.app.chain(tokens, size, space)
    seen = [type(h).__name__ for h in hashes] if isinstance(hashes, list) else type(hashes).__name__
    lab.expect(seen == ["bytes"] * (len(tokens) // size), "chain answers a list of bytes, one hash a full block",
               f"for {len(tokens)} tokens in blocks of {size}: {seen}")  # fmt: skip
    return hashes


def told_apart(lab: Lab) -> None:
    """Two mistakes that the count of different hashes would show as well, each with its own name."""
    one, other = lab.app.chain([1, 23, 7, 7], 2), lab.app.chain([12, 3, 7, 7], 2)
    lab.expect(one[0] != other[0], "tokens run together: 1, 23 and 12, 3 hash alike; give each a fixed width")
    lab.expect(one[1] != other[1], detail="7, 7 behind 1, 23 and behind 12, 3 has one hash")


def same_in_another_process(lab: Lab, tokens: list[int], whole: list[bytes]) -> None:
    """The chain once more, while the module under test has the `hash` of a process with another seed: as good as starting one,
    and done at once."""
    if "hash" in vars(lab.app):  # a function of its own
        return

    def reseeded(thing: object) -> int:
        return hash(("another seed", thing))

    lab.app.hash = reseeded
    try:
        again = lab.app.chain(tokens, SIZE)
    finally:
        del lab.app.hash
    lab.expect(again == whole, "Python's hash is another one in each process, and of 8 bytes; take one of hashlib's",
               f"{len(set(again) - set(whole))} of {len(whole)} hashes of the same tokens change with the seed")  # fmt: skip


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


def answers(engine: Engine, waves: Sequence[Sequence[list[int]]], max_tokens: int = 8) -> dict[int, list[int]]:
    """Ids by request. Each wave of prompts arrives when the one before has ended; blocks are counted after every step."""
    ids: dict[int, list[int]] = {}

    def keep(running: Engine, outputs: list[Output]) -> None:
        running.check()
        for output in outputs:
            ids[output.id] += output.token_ids

    for wave in waves:
        requests = [request(len(ids) + i, tokens, max_tokens=max_tokens) for i, tokens in enumerate(wave)]
        ids |= {asked.id: [] for asked in requests}
        run(engine, requests, each=keep)
    return ids


def engine_with(lab: Lab, num_blocks: int, publish: bool = True, **limits: int) -> Engine:
    """The engine around the learner's cache. publish False: the cache is there and keeps nothing."""
    bounds = limits_of(num_blocks, **limits)
    backend = FakeBackend(num_blocks, bounds.block_size, vocabulary=1000)
    return Engine(backend, parts_with(prefix_cache=lab.app), bounds, prefix_cache=publish)


def full_of_cached(lab: Lab, blocks: int) -> Callable[[], None]:
    """One step in a pool that is all cached: the oldest block goes to a new digest, and is cached again."""
    cache, fresh = cache_of(lab, blocks), count(1)
    cache.release(published(cache, [next(fresh).to_bytes(16) for _ in range(blocks)]))

    def step() -> None:
        (block,) = cache.allocate(1)
        cache.publish(block, next(fresh).to_bytes(16))
        cache.release([block])

    return step


def eviction_does_not_search(lab: Lab) -> None:
    """What a step costs in a full cache, large against small."""
    large, small = full_of_cached(lab, 8192), full_of_cached(lab, 64)
    lab.ratio(large, small, name="an eviction among 8,192 cached blocks against 64", gate="< 15",
              probably="the oldest is searched for, or all are counted anew; keep cached blocks in order of use")  # fmt: skip


def refused(lab: Lab, cache: Any, block: int, digest: bytes) -> None:
    """Nobody holds this block, and every method that needs a holder has to say so, publish=False or not."""
    off = cache_of(lab, block, publish=False)
    calls: dict[str, Callable[[], object]] = {
        "release": lambda: cache.release([block]),
        "fork": lambda: cache.fork([block]),
        "publish": lambda: cache.publish(block, digest),
        "publish, with publish=False,": lambda: off.publish(block, digest),
        "prepare_write": lambda: cache.prepare_write(block),
    }
    for what, call in calls.items():
        lab.raises(ValueError, call, f"{what} has to refuse a block that nobody holds, by name", [block])
