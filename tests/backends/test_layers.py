"""Linear maps and rotary positions against their formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cutaway.backends.torch.layers import (
    Linear,
    RMSNorm,
    interleave,
    linear_kind,
    rotary_frequencies,
    rotary_table,
    rotate,
    tied,
)
from cutaway.checkpoints.config import ModelConfig, RopeScaling

CONFIG = ModelConfig("llama", 32, 64, 96, 1, 4, 2, 16, 4096, rope_theta=10000.0)
PLAIN = [10000.0 ** (-2 * i / 16) for i in range(8)]


def frequencies(**scaling):
    return rotary_frequencies(replace(CONFIG, rope_scaling=RopeScaling(**scaling))).tolist()


def test_default_rope():
    assert rotary_frequencies(CONFIG).tolist() == pytest.approx(PLAIN, rel=1e-12)


def test_linear_rope_divides_every_frequency():
    assert frequencies(kind="linear", factor=4.0) == pytest.approx([f / 4 for f in PLAIN], rel=1e-12)


def test_factors_divide_each_its_own():
    factors = (1.0, 1.0, 1.5, 2.0, 3.0, 8.0, 8.0, 8.0)
    assert frequencies(kind="factors", factors=factors) == pytest.approx(
        [f / d for f, d in zip(PLAIN, factors, strict=True)], rel=1e-12
    )


def test_llama3_rope_by_wavelength():
    low, high, factor, original = 1.0, 4.0, 8.0, 512
    expected = []
    for f in PLAIN:
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            expected.append(f)
        elif wavelength > original / low:
            expected.append(f / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * f / factor + smooth * f)
    assert 0 < sum(e not in (f, f / factor) for e, f in zip(expected, PLAIN, strict=True)) < 8  # all three cases occur
    assert frequencies(
        kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original
    ) == pytest.approx(expected, rel=1e-12)


def test_yarn_keeps_fast_frequencies_and_stretches_slow_ones():
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position=256, beta_fast=32, beta_slow=1, attention_factor=1.2)

    def index(turns):
        return 16 * math.log(256 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(index(32)), 0), min(math.ceil(index(1)), 15)
    expected = []
    for i, f in enumerate(PLAIN):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(f / 4 * ramp + f * (1 - ramp))
    config = replace(CONFIG, rope_scaling=scaling)
    assert rotary_frequencies(config).tolist() == pytest.approx(expected, rel=1e-12)
    assert rotary_table(config, 0, 8).abs().numpy() == pytest.approx(1.2, rel=1e-6)


def test_rotation_of_interleaved_heads_is_the_half_split_formula():
    heads, dim, positions = 3, 16, torch.tensor([0, 1, 500, 4095])
    x = torch.randn(4, heads, dim, generator=torch.Generator().manual_seed(0))
    order = interleave(torch.arange(heads * dim), dim).view(heads, dim) % dim
    angles = positions[:, None].double() * torch.tensor(PLAIN).double()
    cos, sin = (torch.cat((t, t), -1)[:, None] for t in (angles.cos(), angles.sin()))
    half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
    expected = (x * cos + half * sin)[..., order[0]]
    table = rotary_table(CONFIG, 0, 4096)[positions].unsqueeze(1)
    assert torch.allclose(rotate(x[..., order[0]], table), expected.float(), atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5])  # a single token has a kernel of its own
@pytest.mark.parametrize("size", [3.0, 1e-3])  # where the mean square is far over eps, and where eps counts
def test_rms_norm(tokens, size):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(tokens, 64, generator=generator) * size + size, torch.randn(64, generator=generator)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(RMSNorm(weight, 1e-5)(x), expected, atol=1e-5)
    assert (RMSNorm(weight.bfloat16(), 1e-5)(x.bfloat16()) - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_linear_maps(dtype, tolerance, biased, rows):
    rng = np.random.default_rng(rows)
    weight, x, residual = (torch.from_numpy(rng.standard_normal(s)).to(dtype) for s in ((48, 64), (rows, 64), (rows, 48)))
    bias = torch.from_numpy(rng.standard_normal(48)).to(dtype) if biased else None
    weight = (weight / 8).to(dtype)
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    with torch.inference_mode():
        for kind in {Linear, linear_kind(dtype)}:
            linear = kind(weight, bias)
            assert linear.nbytes == 48 * 64 * dtype.itemsize
            assert linear(x).dtype == dtype
            assert torch.allclose(linear(x).double(), exact, atol=tolerance)
            assert torch.allclose(linear.add(x, residual).double(), exact + residual.double(), atol=2 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(384, 64), (100, 64), (128, 30)])
def test_a_tied_embedding_answers_its_rows(dtype, shape):
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal(shape)).to(dtype)
    ids = torch.tensor([0, 1, 63, 64, shape[0] - 1, 5, 5])
    with torch.inference_mode():
        for kind in {Linear, linear_kind(dtype)}:
            embedding, head = tied(weight.clone(), kind)
            assert torch.equal(embedding(ids), weight[ids])
            assert torch.allclose(head(weight[:2]).double(), weight[:2].double() @ weight.double().T, atol=0.5)
            assert embedding.nbytes + head.nbytes in (weight.nbytes, 2 * weight.nbytes)
