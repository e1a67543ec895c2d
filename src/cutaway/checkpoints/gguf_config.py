"""GGUF metadata -> `ModelConfig`, generation defaults and text assets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn, TypeVar

import numpy as np

from cutaway.checkpoints.checkpoint import GenerationDefaults
from cutaway.checkpoints.config import ModelConfig, RopeScaling
from cutaway.checkpoints.gguf_header import GGUFHeader, TensorInfo
from cutaway.checkpoints.parse import ROOM, SUPPORTED, check_sizes, short
from cutaway.core.errors import CheckpointError
from cutaway.core.text_assets import TextAssets, Vocabulary

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # llama is Llama, SmolLM2 and Mistral
CONTROL = 3
_PER_STRING = 256  # bytes that a token or a merge takes at least, once the tokenizer is built
# tokens that end a turn; each counts only where the file's own template writes it (eos_token_id often names another)
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>")
T = TypeVar("T", int, float, str, bool)


def _fail(header: GGUFHeader, what: str) -> NoReturn:
    raise CheckpointError(f"{header.path}: {what}")


def _get(header: GGUFHeader, key: str, kind: type[T], default: T | None = None) -> T:
    """A scalar of the metadata, checked for its type; an error if it is absent and has no default."""
    value = header.metadata.get(key)
    if value is None:
        if default is None:
            _fail(header, f"metadata {key!r} is missing")
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is float and isinstance(value, float) and math.isfinite(value) and float(np.float32(value)) == value:
        value = float(str(np.float32(value)))  # stored as float32: 1e-5, not 9.99999975e-06
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        _fail(header, f"metadata {key!r} should be {kind.__name__}")
    return value


def architecture(header: GGUFHeader) -> str:
    parts = _get(header, "split.count", int, 1)
    if parts > 1:
        _fail(header, f"is one of {parts} parts of a model; join them first (llama-gguf-split --merge)")
    name = _get(header, "general.architecture", str)
    if name not in ARCHITECTURES:
        _fail(
            header, f"architecture {short(name)} is not supported; supported in GGUF: {', '.join(ARCHITECTURES)} ({SUPPORTED})"
        )
    return name


def is_permuted(header: GGUFHeader) -> bool:
    """Whether q and k have interleaved rotary rows: llama.cpp's converter permutes the llama architecture alone."""
    return header.metadata.get("general.architecture") == "llama"


def model_config(header: GGUFHeader, tensors: Mapping[str, TensorInfo], rope_factors: tuple[float, ...]) -> ModelConfig:
    """The configuration. Biases, norms and tying follow from the tensors that are there (`tensors` by Hugging Face's names)."""
    arch = architecture(header)
    if _get(header, f"{arch}.expert_count", int, 0):
        _fail(header, f"is a mixture of experts, which is not supported; supported: {SUPPORTED}")
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        _fail(header, "tensor 'token_embd.weight' is missing or not a matrix")
    hidden, heads = _get(header, f"{arch}.embedding_length", int), _get(header, f"{arch}.attention.head_count", int)
    head_dim = _get(header, f"{arch}.attention.key_length", int, hidden // max(1, heads))
    if _get(header, f"{arch}.attention.value_length", int, head_dim) != head_dim:
        _fail(header, "keys and values of different lengths are not supported")
    if _get(header, f"{arch}.rope.dimension_count", int, head_dim) != head_dim:
        _fail(header, "rotary embedding over a part of each head is not supported")
    layers = _get(header, f"{arch}.block_count", int)
    window = _get(header, f"{arch}.attention.sliding_window", int, 0) if arch == "llama" else 0
    first = "model.layers.0."
    context = _get(header, f"{arch}.context_length", int)
    scaling = _rope_scaling(header, arch, context, rope_factors)
    config = ModelConfig(
        architecture=arch,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=_get(header, f"{arch}.feed_forward_length", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_get(header, f"{arch}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_position=context,
        rms_eps=_get(header, f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope_theta=_get(header, f"{arch}.rope.freq_base", float, 10000.0),
        rope_scaling=scaling,
        tie_embeddings="lm_head.weight" not in tensors,
        qkv_bias=first + "self_attn.q_proj.bias" in tensors,
        o_bias=first + "self_attn.o_proj.bias" in tensors,
        mlp_bias=first + "mlp.gate_proj.bias" in tensors,
        qk_norm=first + "self_attn.q_norm.weight" in tensors,
        sliding_windows=(window,) * min(layers, len(tensors)) if window else (),
        dtype={"F16": "f16", "BF16": "bf16"}.get(embedding.type_name, "f32"),  # pyright: ignore[reportArgumentType]
    )
    check_sizes(str(header.path), config)
    if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != head_dim // 2:
        _fail(
            header, f"tensor 'rope_freqs.weight' has {len(scaling.factors)} factors; heads of {head_dim} need {head_dim // 2}"
        )
    return config


def _rope_scaling(header: GGUFHeader, arch: str, context: int, factors: tuple[float, ...]) -> RopeScaling | None:
    kind = _get(header, f"{arch}.rope.scaling.type", str, "none")
    factor = _get(header, f"{arch}.rope.scaling.factor", float, 0.0)
    if kind == "none":
        legacy = _get(header, f"{arch}.rope.scale_linear", float, 0.0)
        kind, factor = ("linear", legacy) if legacy not in (0.0, 1.0) else ("none", 1.0)
    if kind not in ("none", "linear", "yarn"):
        _fail(header, f"rope scaling {short(kind)} is not supported; supported: none, linear, yarn and rope_freqs factors")
    if kind == "none":
        if factors and not all(math.isfinite(f) and f > 0 for f in factors):
            _fail(header, "tensor 'rope_freqs.weight' holds factors that are not positive numbers")
        return RopeScaling("factors", factors=factors) if factors else None
    if factors:
        _fail(header, f"rope scaling {short(kind)} together with rope_freqs factors is not supported")
    if not (math.isfinite(factor) and factor > 0):
        _fail(header, f"metadata '{arch}.rope.scaling.factor' is {factor}; a positive number is needed")
    if kind == "linear":
        return RopeScaling("linear", factor=factor)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_position=_get(header, f"{arch}.rope.scaling.original_context_length", int, context),
        beta_fast=_get(header, f"{arch}.rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=_get(header, f"{arch}.rope.scaling.yarn_beta_slow", float, 1.0),
        attention_factor=_get(header, f"{arch}.rope.scaling.attn_factor", float, 1.0)
        * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    )


def generation_defaults(header: GGUFHeader) -> GenerationDefaults:
    """Ids that end an answer and the id that starts a text. Sampling defaults are not a part of these files."""
    ids: set[int] = set()
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        value = header.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            ids.add(value)
    template = header.metadata.get("tokenizer.chat_template")
    ends = [end for end in TURN_ENDS if isinstance(template, str) and end in template]
    if ends:
        tokens = header.strings("tokenizer.ggml.tokens")
        types = header.numbers("tokenizer.ggml.token_type")
        for end in ends:
            if end in tokens and (index := tokens.index(end)) < len(types) and types[index] == CONTROL:
                ids.add(index)
    bos = header.metadata.get("tokenizer.ggml.bos_token_id")
    return GenerationDefaults(eos_ids=frozenset(ids), bos_id=bos if isinstance(bos, int) else None)


def text_assets(header: GGUFHeader, name: str, vocab_size: int, generation: GenerationDefaults) -> TextAssets:
    """The vocabulary as lists (if they are in proportion to the file), the chat template and the special tokens' texts."""
    model = _get(header, "tokenizer.ggml.model", str)
    count = header.count("tokenizer.ggml.tokens")
    if not 0 < count <= vocab_size:
        _fail(header, f"has {count} tokens for {vocab_size} embedding rows")
    for what in ("token_type", "scores"):
        if header.count(f"tokenizer.ggml.{what}") not in (0, count):
            _fail(header, f"has {header.count(f'tokenizer.ggml.{what}')} entries in tokenizer.ggml.{what} for {count} tokens")
    room = header.size + ROOM
    merges = header.count("tokenizer.ggml.merges")
    if (count + merges) * _PER_STRING > room:
        _fail(
            header,
            f"its vocabulary of {count} tokens and {merges} merges takes more memory than a model of this size should need",
        )
    tokens = header.strings("tokenizer.ggml.tokens")
    special: dict[str, str] = {}
    for key, word in (("bos_token_id", "bos_token"), ("eos_token_id", "eos_token"), ("unknown_token_id", "unk_token")):
        index = header.metadata.get(f"tokenizer.ggml.{key}")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < count:
            _fail(header, f"metadata 'tokenizer.ggml.{key}' is {short(index)}; the vocabulary has {count} tokens")
        special[word] = tokens[index]
    pre = _get(header, "tokenizer.ggml.pre", str, "default")
    template = header.metadata.get("tokenizer.chat_template")
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id")
    return TextAssets(
        name=name,
        vocab_size=vocab_size,
        vocabulary=Vocabulary(
            model=model,
            pre=pre,
            tokens=tokens,
            types=[int(kind) for kind in header.numbers("tokenizer.ggml.token_type")],
            scores=[float(score) for score in header.numbers("tokenizer.ggml.scores")],
            merges=header.strings("tokenizer.ggml.merges"),
            unk_id=unknown if isinstance(unknown, int) else None,
            add_space_prefix=_get(header, "tokenizer.ggml.add_space_prefix", bool, True),
        ),
        chat_template=template if isinstance(template, str) and template else None,
        special_tokens=special,
        bos_id=generation.bos_id,
        eos_ids=generation.eos_ids,
        add_bos=_get(
            header, "tokenizer.ggml.add_bos_token", bool, model == "llama" or pre in ("llama-bpe", "llama3", "llama-v3")
        ),
        room=room,
    )
