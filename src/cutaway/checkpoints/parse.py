"""Hugging Face's config.json and generation_config.json, in the old and the new style.

New style (transformers 5): rope_parameters and dtype. Old style: rope_theta, rope_scaling and torch_dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cutaway.checkpoints.checkpoint import GenerationDefaults
from cutaway.checkpoints.config import ModelConfig, RopeScaling
from cutaway.core.errors import CheckpointError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SUPPORTED = "Llama, SmolLM2, Mistral, Qwen2, Qwen3"
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
MAX_JSON = 2 << 20  # parsed JSON takes some twenty times its text: more than this would be felt
ROOM = 40 << 20  # bytes that a model's text side may take beside its files' size
_BOUNDS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": 4096,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 4096,
    "max_position": 1 << 24,
}
# what transformers' configuration classes have where config.json leaves a key out
_POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_WINDOW = 4096
Json = Mapping[str, Any]


def short(value: object) -> str:
    """A value from a file as it may stand in an error: quoted, on one line, not long."""
    return repr(str(value)[:80])


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """The object in a small JSON file; one line if it is missing, too large, not JSON or not an object."""
    try:
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path}: has {path.stat().st_size} bytes; at most {limit} are allowed")
        value = json.loads(path.read_bytes()[: limit + 1])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return cast(dict[str, Any], value)


class _Reader:
    """Typed access to one JSON object; every error names the file and the field."""

    def __init__(self, source: str, values: Json):
        self.source, self.values = source, values

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {what}")

    def int(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(f"{key} is missing" if value is None else f"{key} should be an integer")
        return value

    def float(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise self.fail(f"{key} is missing" if value is None else f"{key} should be a finite number")
        return float(value)

    def bool(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{key} should be true or false")
        return value

    def object(self, key: str) -> _Reader | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(f"{key} should be an object")
        return _Reader(f"{self.source} {key}", cast(Json, value))


def architecture(source: str, values: Json) -> str:
    """The family, from `architectures`, else from `model_type`."""
    names = values.get("architectures")
    if isinstance(names, list) and names:
        name = str(cast(list[Any], names)[0])
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    else:
        name = str(values.get("model_type"))
        if name in ARCHITECTURES.values():
            return name
    raise CheckpointError(
        f"{source}: architecture {short(name)} is not supported; supported: {', '.join(ARCHITECTURES)} ({SUPPORTED})"
    )


def parse_config(source: str, values: Json) -> ModelConfig:
    """config.json as an object -> `ModelConfig`. `source` names the file in errors."""
    family, read = architecture(source, values), _Reader(source, values)
    if values.get("quantization_config") is not None:
        raise read.fail("quantized safetensors are not supported; use unquantized weights or a GGUF file")
    if values.get("hidden_act", "silu") != "silu":
        raise read.fail(f"hidden_act {short(values['hidden_act'])} is not supported; supported: silu")
    hidden, heads, layers = read.int("hidden_size"), read.int("num_attention_heads"), read.int("num_hidden_layers")
    position = read.int("max_position_embeddings", _POSITIONS[family])
    theta, scaling = _rope(read, position)
    if scaling is not None and scaling.kind == "yarn":
        position = max(position, int(scaling.original_max_position * scaling.factor))
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise read.fail(f"dtype {short(dtype)} is not supported; supported: {', '.join(_DTYPES)}")
    bias = read.bool("attention_bias", False) if family in ("llama", "qwen3") else False
    shared = heads if "num_key_value_heads" in values else _KV_HEADS.get(family, heads)
    config = ModelConfig(
        architecture=family,
        vocab_size=read.int("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.int("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.int("num_key_value_heads", shared),
        head_dim=read.int("head_dim", 128 if family == "qwen3" else hidden // max(1, heads)),
        max_position=position,
        rms_eps=read.float("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=read.bool("tie_word_embeddings", False),
        qkv_bias=True if family == "qwen2" else bias,
        o_bias=bias,
        mlp_bias=read.bool("mlp_bias", False) if family == "llama" else False,
        qk_norm=family == "qwen3",
        dtype=_DTYPES[dtype],  # pyright: ignore[reportArgumentType]
    )
    check_sizes(source, config)
    windows = _sliding_windows(read, family, layers)
    return config if not windows else _with_windows(config, windows)


def _with_windows(config: ModelConfig, windows: tuple[int, ...]) -> ModelConfig:
    from dataclasses import replace

    return replace(config, sliding_windows=windows)


def check_sizes(source: str, config: ModelConfig) -> None:
    """Sizes that no real model has are refused before anything is computed from them."""
    for field, most in _BOUNDS.items():
        value = getattr(config, field)
        if not 1 <= value <= most:
            raise CheckpointError(f"{source}: {field} is {value}; 1 to {most} is allowed")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(f"{source}: {config.num_heads} heads cannot share {config.num_kv_heads} key-value heads")
    if config.head_dim % 2:
        raise CheckpointError(f"{source}: head_dim {config.head_dim} is odd; rotary embedding needs pairs")
    if not (math.isfinite(config.rms_eps) and 0 <= config.rms_eps <= 1):
        raise CheckpointError(f"{source}: the norm's epsilon is {config.rms_eps}; 0 to 1 is allowed")
    if not (math.isfinite(config.rope_theta) and config.rope_theta > 1):
        raise CheckpointError(f"{source}: rope_theta is {config.rope_theta}; a number above 1 is needed")


def _rope(read: _Reader, position: int) -> tuple[float, RopeScaling | None]:
    new, old = read.object("rope_parameters"), read.object("rope_scaling")
    rope = new or old
    theta = read.float("rope_theta", 10000.0)
    if rope is None:
        return theta, None
    theta = rope.float("rope_theta", theta)
    if rope.float("partial_rotary_factor", read.float("partial_rotary_factor", 1.0)) != 1.0:
        raise rope.fail("partial rotary embedding is not supported")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise rope.fail(f"rope type {short(kind)} is not supported; supported: default, linear, llama3, yarn")
    factor = rope.float("factor")
    original = rope.int("original_max_position_embeddings", position)
    if factor <= 0 or not 1 <= original <= _BOUNDS["max_position"]:
        raise rope.fail(f"factor {factor} and original_max_position_embeddings {original} should be positive")
    if kind == "linear":
        return theta, RopeScaling("linear", factor=factor)
    if kind == "llama3":
        low, high = rope.float("low_freq_factor", 1.0), rope.float("high_freq_factor", 4.0)
        if not 0 < low < high:
            raise rope.fail(f"low_freq_factor {low} should be positive and below high_freq_factor {high}")
        return theta, RopeScaling(
            "llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original
        )
    return theta, _yarn(rope, factor, original)


def _yarn(rope: _Reader, factor: float, original: int) -> RopeScaling:
    if rope.bool("truncate", True) is False:
        raise rope.fail("yarn without truncation is not supported")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = mscale(1.0)
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        attention = mscale(rope.float("mscale")) / mscale(rope.float("mscale_all_dim"))
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.float("beta_fast", 32.0),
        beta_slow=rope.float("beta_slow", 1.0),
        attention_factor=rope.float("attention_factor", attention),
    )


def _sliding_windows(read: _Reader, family: str, layers: int) -> tuple[int, ...]:
    """One window a layer, as each family's code derives them; () if all layers see everything.

    Mistral: sliding_window on every layer. Qwen: only with use_sliding_window, and then from layer max_window_layers on.
    Without the key the window is 4096, as in those families' classes; null is none.
    layer_types, where present, says it layer by layer.
    """
    window = read.int("sliding_window", 0 if "sliding_window" in read.values else _WINDOW)
    if family == "llama" or window == 0 or (family != "mistral" and not read.bool("use_sliding_window", False)):
        return ()
    if window < 0:
        raise read.fail(f"sliding_window is {window}; a positive number is needed")
    types = read.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(cast(list[Any], types)) != layers:
            raise read.fail(f"layer_types should list {layers} layers")
        kinds = [str(kind) for kind in cast(list[Any], types)]
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise read.fail(f"layer type {short(min(unknown))} is not supported; supported: full_attention, sliding_attention")
        sliding = [kind == "sliding_attention" for kind in kinds]
    else:
        first = 0 if family == "mistral" else read.int("max_window_layers", 28)
        sliding = [layer >= first for layer in range(layers)]
    return tuple(window if flag else 0 for flag in sliding) if any(sliding) else ()


def token_ids(source: str, value: Any, key: str) -> frozenset[int]:
    """An id, a list of ids or nothing, as eos_token_id has it."""
    items = cast(list[Any], value) if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise CheckpointError(f"{source}: {key} should be an id or a list of ids")
    return frozenset(item for item in items if item >= 0)


def parse_generation(source: str, config: Json, values: Json, tokenizer_eos: frozenset[int]) -> GenerationDefaults:
    """generation_config.json (may be empty) with what config.json and the tokenizer add: the union of all end tokens."""
    eos = token_ids(source, values.get("eos_token_id"), "eos_token_id")
    eos |= token_ids(source, config.get("eos_token_id"), "eos_token_id") | tokenizer_eos
    bos = values.get("bos_token_id", config.get("bos_token_id"))
    return GenerationDefaults(eos_ids=eos, bos_id=bos if isinstance(bos, int) and not isinstance(bos, bool) else None)
