"""The sampler against a straightforward oracle that takes one row at a time, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cutaway.backends.torch import sampler
from cutaway.backends.torch.sampler import SamplingRows, keep, noise, penalize, sample
from cutaway.core.request import SamplingParams

INF = float("inf")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(params, positions=None, histories=None):
    """Rows with histories [(prompt, answer)] padded with ids that would be noticed."""
    positions = positions if positions is not None else [0] * len(params)
    history = None
    if histories is not None:
        lengths = [len(p) + len(a) for p, a in histories]
        tokens = torch.full((len(params), max(lengths)), 3)
        for row, (p, a) in enumerate(histories):
            tokens[row, : lengths[row]] = torch.tensor([*p, *a])
        history = (tokens, torch.tensor(lengths), torch.tensor([len(p) for p, _ in histories]))
    return SamplingRows.build(params, positions, history)


def oracle_penalties(logits, p, prompt, answer):
    logits = logits.astype(np.float64).copy()
    for t in set(prompt) | set(answer):
        logits[t] = logits[t] / p.repetition_penalty if logits[t] > 0 else logits[t] * p.repetition_penalty
    for t in set(answer):
        logits[t] -= p.presence_penalty + p.frequency_penalty * answer.count(t)
    return logits


def oracle_kept(scaled, p):
    """Ids that the filters leave, and those whose standing a rounding could change."""
    order = np.argsort(-scaled, kind="stable")
    kept = list(order)
    if p.top_k > 0:
        kth = scaled[order[min(p.top_k, len(order)) - 1]]
        kept = [i for i in kept if scaled[i] >= kth]
    mass = np.exp(scaled[kept] - scaled[kept].max())
    mass /= mass.sum()
    unsure = set()
    if p.top_p < 1:
        before = np.cumsum(mass) - mass
        unsure |= {kept[i] for i in range(1, len(kept)) if abs(before[i] - p.top_p) < 1e-5}
        cut = min(scaled[kept[i]] for i in range(len(kept)) if before[i] < p.top_p)
        kept = [i for i in kept if scaled[i] >= cut]
    if p.min_p > 0:
        floor = scaled.max() + np.log(p.min_p)
        unsure |= {i for i in range(len(scaled)) if abs(scaled[i] - floor) < 1e-5}
        kept = [i for i in kept if scaled[i] >= floor]
    return set(kept), unsure


def random_params(rng, seed):
    return SamplingParams(
        temperature=float(rng.choice([0, 0.3, 1.0, 1.7])),
        top_k=int(rng.choice([0, 0, 1, 5, 40, 5000])),
        top_p=float(rng.choice([1.0, 1.0, 0.1, 0.6, 0.95])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=float(rng.choice([0.0, 0.0, 1.5, -0.5])),
        frequency_penalty=float(rng.choice([0.0, 0.0, 0.7, -0.2])),
        seed=seed,
        logprobs=[None, 0, 3][int(rng.integers(3))],
    )


@pytest.mark.parametrize("vocabulary", [40, 700, 20_011])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_mixed_rows_equal_the_oracle_row_by_row(vocabulary, spread):
    rng = np.random.default_rng(vocabulary)
    for trial in range(25):
        n = int(rng.integers(1, 9))
        logits = (rng.standard_normal((n, vocabulary)) * spread).astype(np.float32)
        params = [random_params(rng, int(rng.integers(2**62))) for _ in range(n)]
        histories = [([int(t) for t in rng.integers(0, vocabulary, rng.integers(1, 30))],
                      [int(t) for t in rng.integers(0, min(vocabulary, 9), rng.integers(0, 12))]) for _ in range(n)]  # fmt: skip
        positions = [len(p) + len(a) for p, a in histories]
        before = torch.from_numpy(logits)
        got = sample(before.clone(), build(params, positions, histories))
        assert not got.bad.any()
        for row, p in enumerate(params):
            final = oracle_penalties(logits[row], p, *histories[row])
            if p.greedy:
                assert final.max() - final[got.ids[row]] < 1e-5
            else:
                scaled = final / p.temperature
                kept, unsure = oracle_kept(scaled, p)
                gumbel = noise(torch.tensor([p.seed]), torch.tensor([positions[row]]), vocabulary)[0].numpy()
                allowed = sorted(kept | unsure)
                score = scaled[allowed] + gumbel[allowed]
                sure = max(s for t, s in zip(allowed, score, strict=True) if t not in unsure or scaled[t] == scaled.max())
                winners = {t for t, s in zip(allowed, score, strict=True) if s > sure - 1e-4}
                assert int(got.ids[row]) in winners, (trial, row, p)
            if p.logprobs is not None:
                raw = logits[row].astype(np.float64)
                logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
                assert got.logprobs.chosen[row] == pytest.approx(logprobs[got.ids[row]], abs=1e-4)
                best = np.argsort(-raw, kind="stable")[: p.logprobs]
                assert got.logprobs.top_ids[row, : p.logprobs].tolist() == best.tolist()
                assert got.logprobs.top[row, : p.logprobs].numpy() == pytest.approx(logprobs[best], abs=1e-4)
            elif got.logprobs is not None:
                assert got.logprobs.chosen[row].isnan() and got.logprobs.top[row].isnan().all()
