"""What the tests of samplers share: batches, and an oracle that takes one row at a time, in float64."""

from __future__ import annotations

import numpy as np
import torch

from cutaway.backends.torch.sampler import SamplingRows
from cutaway.core.request import SamplingParams


def build(params, positions=None, histories=None):
    """Rows with histories [(prompt, answer)] padded with ids that would be noticed."""
    positions = positions if positions is not None else [0] * len(params)
    history = None
    if histories is not None:
        lengths = [len(p) + len(a) for p, a in histories]
        tokens = torch.full((len(params), max(lengths)), 3, dtype=torch.int32)
        for row, (p, a) in enumerate(histories):
            tokens[row, : lengths[row]] = torch.tensor([*p, *a])
        history = (tokens, torch.tensor(lengths), torch.tensor([len(p) for p, _ in histories], dtype=torch.int32))
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
