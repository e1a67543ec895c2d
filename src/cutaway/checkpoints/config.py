"""`ModelConfig`: all that the one decoder needs to know about an architecture, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. Unused fields stay at their defaults.

    linear: every frequency divided by factor. llama3: low frequencies divided, high kept, blended between
    (low_freq_factor, high_freq_factor, original_max_position). yarn: as in the YaRN paper (beta_fast, beta_slow,
    attention_factor scales cos and sin). factors: one divisor a frequency (GGUF's rope_freqs tensor).
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches. Weights have Hugging Face's names and layout (q and k in half-split rotary order)."""

    architecture: str  # "llama", "mistral", "qwen2", "qwen3"; a GGUF file calls Mistral "llama" as well
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False  # biases on q, k, v
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before rotation
    sliding_windows: tuple[int, ...] = ()  # one a layer, 0 = full; empty: all full
    dtype: Literal["f32", "f16", "bf16"] = "bf16"  # as stored, after dequantization f32 counts as bf16 for "auto"
