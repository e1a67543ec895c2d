"""2,000 random traces: tiny pools, shared prefixes, aborts in every state, results that come late."""

from __future__ import annotations

import random

import pytest
from harness import VOCABULARY, Job, Scenario, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutaway.core.plan import Limits
from cutaway.core.request import SamplingParams

FAMILIES = [random.Random(seed).choices(range(VOCABULARY), k=200) for seed in range(3)]


def a_prompt(rng: random.Random, size: int, longest: int) -> list[int]:
    """Of one of three families, so that many share a beginning; lengths at, before and behind the edge of a block."""
    length = max(1, rng.randint(0, max(1, longest // size)) * size + rng.choice([-1, 0, 1, rng.randint(0, size)]))
    prompt = rng.choice(FAMILIES)[:length]
    if rng.random() < 0.2:
        prompt[0] = rng.randrange(VOCABULARY)  # the same blocks behind another beginning
    if rng.random() < 0.3:
        own = rng.randint(1, length)
        prompt = prompt[:-own] + rng.choices(range(VOCABULARY), k=own)
    return prompt


def a_job(rng: random.Random, size: int, pool: int) -> Job:
    prompt = a_prompt(rng, size, pool * size // rng.choice([1, 2, 4]))
    room = max(1, pool * size + 1 - len(prompt))  # now and then one more than the pool holds
    params = SamplingParams(
        temperature=rng.choice([0, 0, 1.0]),
        seed=rng.randint(0, 9),
        max_tokens=rng.choice([1, rng.randint(1, 2 * size), rng.randint(1, room), room + rng.choice([0, 0, 1])]),
    )
    return Job(
        prompt=prompt,
        params=params,
        stop_ids=frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 0, 0, 2]))),
        arrival=rng.choice([0, 0, rng.randint(0, 15)]),
        abort_after=rng.choice([None, None, None, None, rng.randint(0, 20)]),
    )


def a_scenario(rng: random.Random, depth: int, jobs: int, swap: float = 0.5) -> Scenario:
    size = rng.choice([2, 4, 4, 16])
    pool = rng.randint(2, 10)
    limits = Limits(
        rows=rng.randint(1, 5),
        budget=rng.choice([rng.randint(1, 12), rng.randint(8, 100)]),
        chunk=rng.choice([rng.randint(1, 12), 100]),
        window=rng.choice([60, 1000, 1000]),
        block_size=size,
    )
    return Scenario(
        jobs=[a_job(rng, size, pool) for _ in range(jobs)],
        limits=limits,
        num_blocks=pool + 1,
        depth=depth,
        delay=rng.randint(0, depth + 1),
        cache=rng.random() < 0.75,
        whole=rng.random() < 0.15,
        swap=rng.random() < swap,
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
@settings(max_examples=667, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), jobs=st.integers(1, 9))
def test_random_traces(depth: int, seed: int, jobs: int) -> None:
    run(a_scenario(random.Random(seed), depth, jobs))


@pytest.mark.parametrize("depth", [0, 1])
def test_random_traces_that_swap(depth: int) -> None:
    """Chunked and whole, cached and not, with aborts in every state; what comes back from the host is right to the bit."""
    stats = [run(a_scenario(random.Random(seed), depth, 6, swap=1.0)).stats() for seed in range(400)]
    assert sum(s.swapped_in for s in stats) > 100
