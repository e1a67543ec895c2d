"""The eight workloads, engine-neutral: prompts of token ids and lengths, the same draws on every engine and machine.

Ids go up to 10,000, so they are valid in every vocabulary of interest. Lengths in tokens, times in seconds.
"""

from __future__ import annotations

from random import Random

HIGHEST_ID = 10_000
Prompts = list[list[int]]


def ids(random: Random, count: int, highest: int = HIGHEST_ID) -> list[int]:
    return [random.randint(0, highest) for _ in range(count)]


def prompts(seed: int, rows: int, length: int, highest: int = HIGHEST_ID) -> Prompts:
    """`rows` prompts that share nothing, other ones for each seed: for the verbs' own loads."""
    return [ids(Random(1000 * seed + row), length, highest) for row in range(rows)]


def w1(sequences: int = 256) -> tuple[Prompts, list[int]]:
    """Throughput: 256 prompts of 100 to 1024 tokens and an answer of 100 to 1024 each; the CPU takes the first 32."""
    random = Random(0)
    # The length is drawn before the ids it counts: the order of draws is part of the workload.
    prompts = [ids(random, random.randint(100, 1024)) for _ in range(256)]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    return prompts[:sequences], outputs[:sequences]


def w2(repeat: int, length: int = 128) -> Prompts:
    """One stream: 256 tokens after a prompt of 128."""
    return [ids(Random(1000 + repeat), length)]


def w2_repetitive(repeat: int, length: int = 128) -> Prompts:
    """W2 with a prompt that repeats 16 tokens, for speculation."""
    pattern = ids(Random(5000 + repeat), 16)
    return [(pattern * (length // 16 + 1))[:length]]


def w3(repeat: int) -> Prompts:
    """Decode: 64 prompts of 512, 256 tokens each."""
    random = Random(2000 + repeat)
    return [ids(random, 512) for _ in range(64)]


def w4(repeat: int, length: int = 8192) -> Prompts:
    """Time to the first token of one long prompt; 4096 on the CPU."""
    return [ids(Random(3000 + repeat), length)]


def w5(prefix_seed: int, suffix_seed: int, requests: int = 64) -> Prompts:
    """Prefix cache: 2048 tokens shared by all, 64 of their own, 32 answered; 16 requests on the CPU."""
    prefix, random = ids(Random(4000 + prefix_seed), 2048), Random(9000 + suffix_seed)
    return [prefix + ids(random, 64) for _ in range(requests)]


def w6(requests: int = 128) -> Prompts:
    """Host time a step: prompts of two tokens, 512 each."""
    return [[1, 2] for _ in range(requests)]


def w7(sequences: int = 256) -> tuple[Prompts, list[int]]:
    """W1 in a pool of a quarter of the blocks that W1 held at its height."""
    return w1(sequences)


def w8(rate: float, requests: int, seed: int = 0) -> list[tuple[float, list[int]]]:
    """(arrival, prompt of 512): Poisson arrivals at `rate` a second, 128 tokens each, over HTTP."""
    random, now, arrivals = Random(seed), 0.0, list[tuple[float, list[int]]]()
    for _ in range(requests):
        now += random.expovariate(rate)
        arrivals.append((now, ids(random, 512)))
    return arrivals
