"""The few layers of the decoder: linear maps with packed weights, RMS norm, rotary positions."""

from __future__ import annotations

import ctypes
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.checkpoints.config import ModelConfig, RopeScaling


class Linear:
    """y = x W^T + b with W [out, in]. Raises nothing of its own."""

    __slots__ = ("bias", "nbytes", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight = weight
        self.bias = bias
        self.nbytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + self(x)"""
        return F.linear(x, self.weight, self.bias).add_(residual)


class PackedLinear(Linear):
    """The same with the weight in oneDNN's blocked layout: a third more of the memory's rate at one row than F.linear,
    which packs on every call. The weight is held in this layout alone."""

    __slots__ = ("_plain", "_residual")

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__(weight, bias)
        pointwise = torch.ops.mkldnn._linear_pointwise  # pyright: ignore[reportPrivateUsage]  # absent from builds without oneDNN
        self._plain, self._residual = pointwise.default, pointwise.binary
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # pyright: ignore[reportPrivateUsage]

    def __call__(self, x: Tensor) -> Tensor:
        return self._plain(x, self.weight, self.bias, "none", [], "")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._residual(x, residual, self.weight, self.bias, "add")


class Embedding:
    """Rows of weight [vocabulary, hidden] by id."""

    __slots__ = ("nbytes", "weight")

    def __init__(self, weight: Tensor, nbytes: int | None = None):
        self.weight = weight
        self.nbytes = weight.nbytes if nbytes is None else nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids)


class SharedEmbedding(Embedding):
    """Rows looked up in the packed weight of a tied head, so that the largest matrix is in memory once."""

    __slots__ = ("head",)

    def __init__(self, head: PackedLinear, rows: Tensor):
        super().__init__(rows, nbytes=0)
        self.head = head  # owns the memory that `rows` looks into

    def __call__(self, ids: Tensor) -> Tensor:
        return self.weight[ids // _OUT, :, ids % _OUT].flatten(1)


_OUT, _IN = 64, 2  # oneDNN's bf16 layout on x86: [out / 64, in / 2, 64, 2]


def tied(weight: Tensor, kind: type[Linear]) -> tuple[Embedding, Linear]:
    """Embedding and head of one weight. They share memory if the packed layout is the one known here: it is oneDNN's own
    affair, so every bit is compared."""
    head = kind(weight)
    apart = Embedding(weight, nbytes=0 if kind is Linear else None)
    if not isinstance(head, PackedLinear) or weight.dtype != torch.bfloat16 or weight.shape[0] % _OUT or weight.shape[1] % _IN:
        return apart, head
    size, hidden = weight.shape
    memory = (ctypes.c_char * weight.nbytes).from_address(torch.ops.mkldnn.data_ptr(head.weight))
    rows = torch.frombuffer(memory, dtype=weight.dtype).view(size // _OUT, hidden // _IN, _OUT, _IN)
    for block, expected in zip(rows.split(16), weight.split(16 * _OUT), strict=True):
        if not torch.equal(block.transpose(1, 2).reshape(-1, hidden).view(torch.int16), expected.view(torch.int16)):
            return apart, head
    return SharedEmbedding(head, rows), head


def linear_kind(dtype: torch.dtype) -> type[Linear]:
    """PackedLinear where this build and this processor run it for `dtype`, else Linear."""
    if not torch.backends.mkldnn.is_available():
        return Linear
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # pyright: ignore[reportPrivateUsage]
        return Linear
    return PackedLinear


class RMSNorm:
    """weight * x / rms(x) over the last axis of x [tokens, hidden], statistics in float32."""

    __slots__ = ("_mirrored", "_signs", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float):
        self.weight = weight
        self.eps = eps
        self._mirrored = weight.repeat(2, 1)
        self._signs = weight.new_tensor([[1.0], [-1.0]])

    def __call__(self, x: Tensor) -> Tensor:
        """For a single token as the layer norm of (x, -x), whose mean is 0 and whose variance is the mean of x^2: one kernel,
        where torch composes rms_norm of ten, which at one row cost as much as a matrix does."""
        if x.shape[0] == 1:
            return torch.layer_norm(x * self._signs, self._mirrored.shape, self._mirrored, None, self.eps)[:1]
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_table(config: ModelConfig, start: int, stop: int) -> Tensor:
    """cos + i sin of the angles of positions start to stop - 1: complex64 [stop - start, head_dim / 2], scaled by YaRN's
    attention factor."""
    frequencies = rotary_frequencies(config)
    angles = torch.outer(torch.arange(start, stop, dtype=torch.float64), frequencies)
    scaling = config.rope_scaling
    scale = scaling.attention_factor if scaling and scaling.kind == "yarn" else 1.0
    return torch.polar(torch.full_like(angles, scale), angles).to(torch.complex64)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position, float64 [head_dim / 2]: theta^(-2i / head_dim), stretched as `config.rope_scaling` says."""
    dim = config.head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float64)
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return _yarn(frequencies, scaling, config)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: wavelengths over original / low are divided by the factor, those under original / high kept, between
    them a blend linear in original / wavelength."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # turns within the original window
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """YaRN (Peng et al. 2023), eq. 23: frequencies that turn more than beta_fast times within the original window are
    kept, those under beta_slow divided by the factor, with a ramp linear in the index between the two."""
    dim = config.head_dim

    def index(turns: float) -> float:
        period = scaling.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(period) / (2 * math.log(config.rope_theta))

    low = max(math.floor(index(scaling.beta_fast)), 0)
    high = min(math.ceil(index(scaling.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotates each head's pairs. x [tokens, heads, dim] with the two halves of a pair side by side, turns complex64
    [tokens, 1, dim / 2]. One complex product in float32: the fewest calls, and no rounding of cos and sin to bf16."""
    return (x.float().view(torch.complex64) * turns).view(torch.float32).to(x.dtype)


def interleave(weight: Tensor, dim: int) -> Tensor:
    """Rows of q or k from half-split order (0, dim/2, 1, ...) as pairs apart to pairs side by side; weight [heads * dim, ...].
    The same order of q and k leaves every score as it is."""
    return weight.view(-1, 2, dim // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
