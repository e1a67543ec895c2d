"""Which tensors a `ModelConfig` calls for, in Hugging Face's names and shapes, and the check that a file has them."""

from __future__ import annotations

from collections.abc import Mapping

from cutaway.checkpoints.config import ModelConfig
from cutaway.core.errors import CheckpointError

Shape = tuple[int, ...]


def layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name within one decoder layer ("self_attn.q_proj.weight") -> shape; matrices are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, out, into, bias in (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model, in the order in which a forward pass meets them."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    layer = layer_tensors(config)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def check_tensors(source: str, config: ModelConfig, found: Mapping[str, Shape]) -> list[str]:
    """The model's tensor names, after a check that `found` has each in its shape and no weight that would be ignored.

    A weight that the decoder would not use (a bias that the configuration denies, another layer) makes answers silently
    wrong, so it is an error; rotary tables of old checkpoints and the copy of a tied head are the known exceptions.
    """
    if config.num_layers > len(found):
        raise CheckpointError(
            f"{source}: the configuration has {config.num_layers} layers, but the file only {len(found)} tensors"
        )
    wanted = tensors(config)
    for name, shape in wanted.items():
        if name not in found:
            raise CheckpointError(f"{source}: tensor {name!r} is missing")
        if found[name] != shape:
            raise CheckpointError(
                f"{source}: tensor {name!r} has shape {list(found[name])}, but the configuration asks for {list(shape)}"
            )
    for name in found:
        if name not in wanted and name != "lm_head.weight" and not name.endswith(".rotary_emb.inv_freq"):
            raise CheckpointError(f"{source}: tensor {name!r} has no place in architecture {config.architecture!r}")
    return list(wanted)
