"""The one decoder: Llama and its kin (Mistral, Qwen2, Qwen3), as `ModelConfig` switches it, over a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.backends.torch.layers import Embedding, Linear, RMSNorm, interleave, linear_kind, rotary_table, rotate, tied
from cutaway.checkpoints import Checkpoint

FIRST_TURNS = 2048  # positions whose rotation is known from the start


@dataclass(slots=True)
class Batch:
    """The tokens of one step, rows one after another.

    token_ids, positions, slots   int64 [tokens]; a slot is block * block_size + offset
    block_tables int32 [rows, blocks], context_lens int32 [rows], query_starts int32 [rows + 1]: as attention takes them
    sampled      int64 [n]: tokens whose logits are wanted
    extras       keyword arguments for the attention part's write_kv and paged_attention, beyond the contract's
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor
    sampled: Tensor
    extras: dict[str, Any]


class AttentionPart(Protocol):
    """Part 07, as the decoder calls it."""

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, **extras: Any) -> None: ...
    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        *,
        scale: float,
        **extras: Any,
    ) -> Tensor: ...


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer. qkv and gate_up are fused along their outputs. qk_norm [heads + kv_heads, head_dim]
    holds q's norm weight once a query head, then k's once a key head."""

    input_norm: RMSNorm
    qkv: Linear
    qk_norm: Tensor | None
    o: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear
    window: int


class Decoder:
    """Weights on the device, and the step over them."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype):
        """Loads one tensor at a time; beside the weights as held, no more than that is in memory."""
        loader = _Loader(checkpoint, dtype)
        config = self.config = checkpoint.config
        self.dtype = dtype
        self.embedding, self.head = loader.ends()
        self.layers = [loader.layer(index) for index in range(config.num_layers)]
        self.norm = loader.norm("model.norm.weight")
        self.turns = rotary_table(config, 0, FIRST_TURNS)
        self.scale = config.head_dim**-0.5

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices as held: of a tied embedding twice where it cannot be looked up in the head's layout."""
        return (
            self.embedding.nbytes
            + self.head.nbytes
            + sum(linear.nbytes for x in self.layers for linear in (x.qkv, x.o, x.gate_up, x.down))
        )

    def _turns(self, length: int) -> Tensor:
        """The rotary table of `length` positions or more. It grows with the contexts: a window may be far longer than they."""
        while len(self.turns) < length:
            self.turns = torch.cat((self.turns, rotary_table(self.config, len(self.turns), 2 * len(self.turns))))
        return self.turns

    def rotation(self, positions: Tensor, length: int) -> Tensor:
        """Cosines and sines of positions [tokens], all below `length`, as `project` takes them."""
        return self._turns(length).index_select(0, positions).unsqueeze(1)

    def project(self, layer: Layer, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer up to its attention: x [tokens, hidden] -> q [tokens, heads, dim], k and v [tokens, kv_heads, dim]."""
        config = self.config
        qkv = layer.qkv(layer.input_norm(x)).view(len(x), -1, config.head_dim)
        qk, v = qkv.split_with_sizes((config.num_heads + config.num_kv_heads, config.num_kv_heads), 1)
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (config.head_dim,), None, config.rms_eps) * layer.qk_norm
        q, k = rotate(qk, turns).split_with_sizes((config.num_heads, config.num_kv_heads), 1)
        return q, k, v

    def finish(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """The layer after its attention: x [tokens, hidden], attended [tokens, heads, head_dim] -> x of the next layer."""
        x = layer.o.add(attended.reshape(len(x), -1), x)
        gate, up = layer.gate_up(layer.post_norm(x)).chunk(2, 1)
        return layer.down.add(F.silu(gate).mul_(up), x)

    def forward(self, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor], attention: AttentionPart) -> Tensor:
        """One step: writes the tokens' keys and values, answers logits [sampled tokens, vocabulary] in the model's dtype."""
        x = self.embedding(batch.token_ids)
        turns = self.rotation(batch.positions, int(batch.context_lens.max()))
        for layer, k_cache, v_cache in zip(self.layers, keys, values, strict=True):
            q, k, v = self.project(layer, x, turns)
            attention.write_kv(k_cache, v_cache, k, v, batch.slots, **batch.extras)
            extras = {**batch.extras, "window": layer.window} if layer.window else batch.extras
            attended = attention.paged_attention(
                q, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_starts,
                scale=self.scale, **extras,
            )  # fmt: skip
            x = self.finish(layer, x, attended)
        return self.head(self.norm(x.index_select(0, batch.sampled)))


class _Loader:
    """Tensors of a checkpoint in the decoder's dtype and layout."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype):
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.dtype = dtype
        self.kind = linear_kind(dtype)

    def tensor(self, name: str) -> Tensor:
        data = self.checkpoint.load(name, "bf16" if self.dtype == torch.bfloat16 else "f32").data
        if not data.flags.writeable:  # a view of the file: torch would warn, and the file would stay mapped
            data = np.array(data)
        return torch.from_numpy(data).view(self.dtype)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.tensor(name), self.config.rms_eps)

    def ends(self) -> tuple[Embedding, Linear]:
        """Embedding and head."""
        weight = self.tensor("model.embed_tokens.weight")
        if self.config.tie_embeddings:
            return tied(weight, self.kind)
        return Embedding(weight), self.kind(self.tensor("lm_head.weight"))

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."
        windows = config.sliding_windows
        return Layer(
            input_norm=self.norm(prefix + "input_layernorm.weight"),
            qkv=self._linear(prefix + "self_attn.", ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
            qk_norm=self._qk_norm(prefix + "self_attn.") if config.qk_norm else None,
            o=self._linear(prefix + "self_attn.", ("o_proj",), config.o_bias),
            post_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            gate_up=self._linear(prefix + "mlp.", ("gate_proj", "up_proj"), config.mlp_bias),
            down=self._linear(prefix + "mlp.", ("down_proj",), config.mlp_bias),
            window=windows[index] if windows else 0,
        )

    def _linear(self, prefix: str, names: tuple[str, ...], biased: bool) -> Linear:
        """One linear map of several, stacked along their outputs."""

        def stack(kind: str) -> Tensor:
            parts = [self._in_order(name, self.tensor(f"{prefix}{name}.{kind}")) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return self.kind(stack("weight"), stack("bias") if biased else None)

    def _in_order(self, name: str, weight: Tensor) -> Tensor:
        return interleave(weight, self.config.head_dim) if name in ("q_proj", "k_proj") else weight

    def _qk_norm(self, prefix: str) -> Tensor:
        q, k = (interleave(self.tensor(f"{prefix}{name}.weight"), self.config.head_dim) for name in ("q_norm", "k_norm"))
        return torch.cat((q.expand(self.config.num_heads, -1), k.expand(self.config.num_kv_heads, -1)))
