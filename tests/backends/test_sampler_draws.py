"""Noise and the distributions that come of it. Seeds are fixed, so that a test that passes once passes always."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cutaway.backends.torch.sampler import SamplingRows, noise, sample
from cutaway.core.request import SamplingParams
from sampling import oracle_kept, oracle_penalties

# Noise


def test_noise_at_some_ids_is_the_noise_of_the_whole_vocabulary_there():
    rng = np.random.default_rng(0)
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345])
    positions = torch.tensor([0, 2**62, -5, 7, 2**63 - 1, 2**31])
    whole = noise(seeds, positions, 30_000)
    ids = torch.from_numpy(rng.integers(0, 30_000, (6, 50)))
    assert torch.equal(noise(seeds, positions, ids), whole.gather(1, ids))
    for row in range(6):  # the same alone, and whatever the vocabulary's size
        assert torch.equal(noise(seeds[row : row + 1], positions[row : row + 1], 100)[0], whole[row, :100])
    assert whole.isfinite().all()


def test_noise_is_pinned():
    """A seed means the same tokens tomorrow: changing these numbers breaks every stored seed."""
    values = noise(torch.tensor([0, 7]), torch.tensor([0, 3]), 3)
    expected = torch.tensor([[1.777847, 0.959928, 1.113037], [0.027541, 1.615713, 0.607091]])
    assert torch.allclose(values, expected, atol=1e-5)


def test_noise_is_gumbel_and_independent_along_every_axis():
    def uniform(x):
        return torch.exp(-torch.exp(-x.double()))  # the distribution function

    n = 256
    base, step = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    for seeds, positions in ((base, step), (step, base), (step, step), (step, -step), (step << 32, base), (base, step << 40)):
        u = uniform(noise(seeds, positions, n))
        counts = torch.histc(u.float(), 64, 0, 1).numpy()
        assert chi_square(counts, np.full(64, 1 / 64)) < limit(63)
        centred = u - 0.5
        for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, 1), (0, 1)), centred.T):
            correlation = float((centred * other).mean() * 12)
            bound = 8 / n if other is not centred.T else 0.05
            assert abs(correlation) < bound
        assert len(np.unique(u.numpy())) > 0.997 * n * n  # 24 bits repeat 128 of 65,536


def test_noise_has_at_least_24_bits():
    gumbel = noise(torch.arange(64), torch.zeros(64, dtype=torch.int64), 65_536)
    assert len(np.unique(gumbel.numpy())) > 2**21
    assert gumbel.max() > 13 and gumbel.min() < -2.6  # 4 million draws reach ln(4e6) = 15.2 +- 1.3 and -ln(15.2)


# Distributions


def chi_square(counts, expected):
    total = counts.sum()
    assert (counts[expected == 0] == 0).all(), "drew what was dropped"
    live = expected > 0
    return float(((counts[live] - total * expected[live]) ** 2 / (total * expected[live])).sum())


def limit(freedom):
    """Far in the tail (about one in 10,000) of chi-square: Wilson and Hilferty's approximation."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 5},
    {"top_k": 7, "temperature": 1.5},
    {"top_p": 0.6},
    {"top_p": 0.9, "temperature": 0.8},
    {"min_p": 0.2},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3},
    {"repetition_penalty": 1.8, "presence_penalty": 0.9, "frequency_penalty": 0.5},
    {"repetition_penalty": 0.7, "top_p": 0.85, "frequency_penalty": -0.6},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("vocabulary", [12, 900])
def test_draws_follow_the_distribution(case, by, vocabulary):
    n = 12_000
    logits = torch.full((vocabulary,), -400.0)
    logits[torch.arange(12) * (vocabulary // 12)] = torch.tensor(
        [2.0, 1.5, -0.5, 0.3, 0.0, -1.0, 1.2, 0.8, -2.0, 0.55, 1.05, -0.2]
    )
    prompt, answer = [0, 3 * (vocabulary // 12)], [vocabulary // 12, vocabulary // 12, 6 * (vocabulary // 12)]
    p = SamplingParams(**case, seed=11)
    final = oracle_penalties(logits.numpy(), p, prompt, answer) / p.temperature
    kept, unsure = oracle_kept(final, p)
    assert not unsure
    expected = np.zeros(vocabulary)
    expected[list(kept)] = np.exp(final[list(kept)] - final.max())
    expected /= expected.sum()
    expected[expected < 1e-9] = 0

    rows = SamplingRows.build(
        [SamplingParams(**case, seed=i) for i in range(n)] if by == "seed" else [p] * n,
        [5] * n if by == "seed" else list(range(n)),
        (torch.tensor([prompt + answer]).expand(n, -1), torch.full((n,), 5), torch.full((n,), 2)),
    )
    counts = np.bincount(sample(logits.expand(n, -1), rows).ids.numpy(), minlength=vocabulary)
    if len(kept) > 1:
        assert chi_square(counts, expected) < limit((expected > 0).sum() - 1)
