"""The model that stages 01 to 05 are given: the engine's own decoder, opened where attention goes.

What a model does to a token alone (norms, projections, rotary positions, the MLP) is in here. What it does *between* tokens,
attention, and everything that an engine is about (which tokens to compute, what to keep of them), is yours.

    x = model.embed(ids)                              # [batch, tokens] -> [batch, tokens, hidden]
    for layer in model.layers:
        q, k, v = layer.qkv(x, positions)             # q [batch, tokens, heads, dim]; k, v [batch, tokens, kv_heads, dim]
        x = layer.finish(x, attend(q, k, v, mask))    # output projection, residual, MLP
    logits = model.logits(x)                          # [batch, tokens, vocabulary]

`model(ids)` is exactly that over whole sequences, causal. `model.counts` says what was computed: forward passes (calls of
`embed`), positions (tokens that went through them), and what the layers and the head had to do with them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.backends.torch.model import Decoder
from cutaway.backends.torch.model import Layer as EngineLayer
from cutaway.checkpoints import Checkpoint, open_checkpoint, resolve
from cutaway.checkpoints.checkpoint import NUMPY_DTYPE, Array, DType, DummyCheckpoint, store
from cutaway.checkpoints.config import ModelConfig
from cutaway.core.text_assets import TextAssets

LADDER = ModelConfig(
    architecture="llama", vocab_size=1024, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=64, max_position=4096, dtype="f32",
)  # fmt: skip
REAL = "smollm2-135m-instruct"  # larger than any cache, so that decode waits for memory, as on every real machine


@dataclass(slots=True)
class Counts:
    """What a model was asked to do since the last `reset`."""

    passes: int = 0
    positions: int = 0
    shapes: list[tuple[int, int]] = field(default_factory=list)  # (batch, tokens) of each pass
    projected: int = 0  # tokens whose q, k and v were computed, summed over the layers
    read_out: int = 0  # positions whose logits were computed

    def reset(self) -> None:
        self.passes = self.positions = self.projected = self.read_out = 0
        self.shapes.clear()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(dim)) v.

    q [batch, tokens, heads, dim]; k, v [batch, keys, kv_heads, dim]; query head h uses key head h // (heads // kv_heads).
    mask: bool [tokens, keys] or [batch, tokens, keys], True where a query may look; every query needs one such key, or its
    output means nothing (NaN or 0, as the library likes). None: every query looks at every key.
    Answers [batch, tokens, heads, dim].
    """
    grouped = q.shape[2] != k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)


class Layer:
    """One decoder layer, in two halves around its attention."""

    def __init__(self, model: Model, layer: EngineLayer):
        self._model = model
        self._layer = layer

    def qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, tokens, hidden], positions int64 [tokens] or [batch, tokens], each at least 0 -> q [batch, tokens, heads,
        dim], k and v [batch, tokens, kv_heads, dim]; q and k are rotated to their positions."""
        batch, tokens, _ = x.shape
        decoder = self._model.decoder
        self._model.counts.projected += batch * tokens
        flat = positions.expand(batch, tokens).reshape(-1)
        turns = decoder.rotation(flat, int(flat.max()) + 1)
        return tuple(t.unflatten(0, (batch, tokens)) for t in decoder.project(self._layer, x.flatten(0, 1), turns))  # type: ignore[return-value]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x as `qkv` took it, attended [batch, tokens, heads, dim] -> x of the next layer [batch, tokens, hidden]."""
        return self._model.decoder.finish(self._layer, x.flatten(0, 1), attended.flatten(0, 1)).unflatten(0, x.shape[:2])


class Model:
    """A decoder-only transformer and what it counts. `eos_ids` end an answer."""

    def __init__(self, decoder: Decoder, eos_ids: Iterable[int] = ()):
        self.decoder = decoder
        self.eos_ids = frozenset(eos_ids)
        self.counts = Counts()
        self.layers = [Layer(self, layer) for layer in decoder.layers]
        config = decoder.config
        self.num_layers, self.num_heads, self.num_kv_heads = config.num_layers, config.num_heads, config.num_kv_heads
        self.head_dim, self.hidden_size, self.vocabulary = config.head_dim, config.hidden_size, config.vocab_size
        self.intermediate_size = config.intermediate_size
        self.window = config.max_position
        self.dtype = decoder.dtype

    @property
    def device(self) -> torch.device:
        return self.decoder.norm.weight.device

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices that one forward pass reads. Of the embedding it reads a row a token, which is nothing."""
        layers = self.decoder.layers
        return self.decoder.head.nbytes + sum(m.nbytes for x in layers for m in (x.qkv, x.o, x.gate_up, x.down))

    def clock(self) -> float:
        """Seconds, for differences: CPU time of this process, so that a neighbour who takes the core costs nothing; on a GPU
        wall time, once everything that was asked of it is done."""
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def with_eos(self, eos_ids: Iterable[int]) -> Model:
        """The same weights, other end-of-sequence ids, its own counts."""
        return Model(self.decoder, eos_ids)

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [batch, tokens] -> [batch, tokens, hidden]. Begins a forward pass, and counts it."""
        if ids.dim() != 2:
            raise ValueError(f"ids must be [batch, tokens], got {list(ids.shape)}")
        self.counts.passes += 1
        self.counts.positions += ids.numel()
        self.counts.shapes.append((ids.shape[0], ids.shape[1]))
        return self.decoder.embedding(ids.reshape(-1)).unflatten(0, ids.shape)

    def logits(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> [batch, tokens, vocabulary]. Give it only the positions whose logits you want."""
        self.counts.read_out += x.shape[0] * x.shape[1]
        return self.decoder.head(self.decoder.norm(x.flatten(0, 1))).unflatten(0, x.shape[:2])

    def __call__(self, ids: Tensor, last: bool = False) -> Tensor:
        """A whole forward pass, causal, nothing kept: int64 [batch, tokens] -> logits [batch, tokens, vocabulary]. The logits
        at position i are the model's opinion on token i + 1. last: those of the last position alone, [batch, 1, vocabulary];
        the same numbers, without a product with the largest matrix for each position that nobody asks about."""
        tokens = ids.shape[1]
        x, positions = self.embed(ids), torch.arange(tokens, device=ids.device)
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=ids.device).tril()
        for layer in self.layers:
            q, k, v = layer.qkv(x, positions)
            x = layer.finish(x, attend(q, k, v, mask))
        return self.logits(x[:, -1:] if last else x)


class LadderCheckpoint(DummyCheckpoint):
    """Seeded random weights whose greedy answers vary from token to token: norms near one, matrices of unit variance."""

    def load(self, name: str, dtype: DType | None = None) -> Array:
        dtype, shape = dtype or "f32", self.shape(name)
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.1 * values
        elif "embed_tokens" in name:
            values *= 0.3
        else:
            values *= (2.0 if "q_proj" in name or "k_proj" in name else 1.5) * np.float32(shape[-1] ** -0.5)
        out = np.empty(shape, NUMPY_DTYPE[dtype])
        store(np.asarray(values, np.float32), out, dtype)
        return Array(out, dtype)


def _seeded(config: ModelConfig) -> Checkpoint:
    return LadderCheckpoint(config, TextAssets("ladder", config.vocab_size), Path("ladder"), name="ladder")


def checkpoint(name: Literal["ladder", "real"]) -> Checkpoint:
    """ "ladder": 3 M seeded weights, nothing on disk. "real": SmolLM2-135M-Instruct, fetched where it is not here."""
    if name == "ladder":
        return _seeded(LADDER)
    return open_checkpoint(resolve(REAL), "auto")


@lru_cache(maxsize=2)
def _decoder(name: Literal["ladder", "real"], dtype: torch.dtype) -> Decoder:
    with torch.inference_mode():
        return Decoder(checkpoint(name), dtype)


def load(name: Literal["ladder", "real"] = "ladder", dtype: torch.dtype | None = None, eos_ids: Iterable[int] = ()) -> Model:
    """A model with counts of its own; its weights are loaded once a process. Default dtype: fp32 for the ladder model, whose
    ids are compared exactly; bf16 for the real one."""
    return Model(_decoder(name, dtype or (torch.float32 if name == "ladder" else torch.bfloat16)), eos_ids)


def of_shape(dtype: torch.dtype = torch.float32, **changes: Any) -> Model:
    """A seeded model that differs from the ladder model in these fields of its config: `of_shape(num_kv_heads=4)`."""
    with torch.inference_mode():
        return Model(Decoder(_seeded(replace(LADDER, **changes)), dtype))
