"""What the checks of stage 09 share: a cache over a small pool, prompts, and the engine around the learner's cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    """(free, cached, used), after the cache's own check."""
    cache.check()
    return cache.num_free, cache.num_cached, cache.num_used


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
