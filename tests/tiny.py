"""Tiny seeded models, one per architecture, as Hugging Face folders and GGUF files. NumPy makes the weights: no torch.

    NAMES                                         "llama", "llama-tied", "llama3", "llama-linear", "llama-yarn", "mistral",
                                                  "qwen2", "qwen3"
    config(name, style="new", **overrides)        config.json as a dict ("old": rope_theta / rope_scaling / torch_dtype)
    weights(name, seed=0, **overrides)            {Hugging Face name: float32 array}, from default_rng([seed, crc32(tensor)])
    write_folder(path, name, seed=0, dtype="float32", shards=1, style="new", **overrides) -> path
    write_gguf(path, name, seed=0, quantization="F32", **overrides) -> path       any type that gguf.quants.quantize offers
    write_safetensors(file, arrays)               {name: float32 | float16 | uint16 (bf16 bits) array}
    tokenizer_json(), CHAT_TEMPLATE, TOKENS       384 tokens; 0 <|endoftext|>, 1 <|im_start|> (bos), 2 <|im_end|> (eos)

overrides are fields of config.json (hidden_size=256, num_hidden_layers=4, ...). The same (name, seed, overrides) gives the same
bytes everywhere. Sizes: vocabulary 384, hidden 64, 2 layers, 4 heads of 16 (qwen3: 32) on 2, inner 128, window 512.
Scales are such that greedy answers vary from token to token.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 384
_WORDS = (
    "the of and to in is that for it as was with be on not he by are at from his have you or this had they which one "
    "were all we her she there would their been has when who will more no if out so said what up its about into than "
    "them can only other new some could time these two may then do first any my now such like our over man me even "
    "most made after also did many before must through back years where much your way well down should because each "
    "just those people how too little state good very user assistant system "
)
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
# name -> (class, model_type, fields, rope)
_MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {}, {"rope_type": "default", "rope_theta": 10000.0}),
    "llama-tied": (
        "LlamaForCausalLM",
        "llama",
        {"tie_word_embeddings": True},
        {"rope_type": "default", "rope_theta": 100000.0},
    ),
    "llama3": ("LlamaForCausalLM", "llama", {}, {"rope_theta": 500000.0} | _LLAMA3),
    "llama-linear": ("LlamaForCausalLM", "llama", {}, {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}),
    "llama-yarn": ("LlamaForCausalLM", "llama", {}, {"rope_theta": 10000.0} | _YARN),
    "mistral": ("MistralForCausalLM", "mistral", {"sliding_window": 16}, {"rope_type": "default", "rope_theta": 10000.0}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "qwen2",
        {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2},
        {"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        "qwen3",
        {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2, "attention_bias": False, "head_dim": 32},
        {"rope_type": "default", "rope_theta": 1000000.0},
    ),
}
NAMES = tuple(_MODELS)


def config(name: str, style: str = "new", **overrides: Any) -> dict[str, Any]:
    """config.json of one tiny model; style "new" (rope_parameters, dtype) or "old" (rope_theta, rope_scaling, torch_dtype)."""
    architecture, model_type, fields, rope = _MODELS[name]
    values = {"architectures": [architecture], "model_type": model_type} | _BASE | fields | overrides
    if style == "new":
        return values | {"rope_parameters": rope, "dtype": values.get("dtype", "float32")}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    values["torch_dtype"] = values.pop("dtype", "float32")
    return values | {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else scaling}


def shapes(name: str, **overrides: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape under Hugging Face's names."""
    c = config(name, **overrides)
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if name == "qwen2":
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if name == "qwen3":
        layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    answer: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for index in range(c["num_hidden_layers"]):
        answer |= {f"model.layers.{index}.{key}": shape for key, shape in layer.items()}
    answer["model.norm.weight"] = (hidden,)
    if not c["tie_word_embeddings"]:
        answer["lm_head.weight"] = (c["vocab_size"], hidden)
    return answer


def weights(name: str, seed: int = 0, **overrides: Any) -> dict[str, np.ndarray]:
    """float32 weights. Norms are near one, matrices keep a unit variance, the embedding is small beside what layers add."""
    answer: dict[str, np.ndarray] = {}
    for tensor, shape in shapes(name, **overrides).items():
        random = np.random.default_rng([seed, zlib.crc32(tensor.encode())]).standard_normal(shape, dtype=np.float32)
        if tensor.endswith("norm.weight"):
            answer[tensor] = 1.0 + 0.1 * random
        elif tensor.endswith(".bias"):
            answer[tensor] = 0.2 * random
        elif "embed_tokens" in tensor:
            answer[tensor] = 0.3 * random
        else:
            gain = 2.0 if "q_proj" in tensor or "k_proj" in tensor else 1.5
            answer[tensor] = gain / np.float32(math.sqrt(shape[-1])) * random
    return {tensor: np.ascontiguousarray(array, np.float32) for tensor, array in answer.items()}


def byte_characters() -> list[str]:
    """Byte -> the character that stands for it in byte-level BPE."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    answer, extra = [], 256
    for byte in range(256):
        answer.append(chr(byte) if byte in plain else chr(extra))
        extra += byte not in plain
    return answer


def _vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    tokens, merges = [*SPECIAL, *byte_characters()], []
    for word in _WORDS.split():
        left = "Ġ"
        for char in word:
            if left + char not in tokens and len(tokens) < VOCABULARY:
                merges.append((left, char))
                tokens.append(left + char)
            left += char
    return tokens, merges


TOKENS, MERGES = _vocabulary()


def tokenizer_json() -> str:
    """A byte-level BPE tokenizer with GPT-2's cutting, as tokenizer.json."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend.to_str()


def to_bf16_bits(array: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits by rounding to nearest even, written out plainly to check the engine's own against."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A safetensors file; uint16 arrays are bfloat16 bits."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in arrays.items():
        entry = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        header[name], at = entry, at + array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in arrays.values()))


def write_folder(
    path: Path, name: str, seed: int = 0, *, dtype: str = "float32", shards: int = 1, style: str = "new", **overrides: Any
) -> Path:
    """A Hugging Face folder: config, weights in one file or in shards with an index, tokenizer, template, generation_config."""
    path.mkdir(parents=True, exist_ok=True)
    cast = {"float32": lambda a: a, "float16": lambda a: a.astype(np.float16), "bfloat16": to_bf16_bits}[dtype]
    arrays = {key: cast(array) for key, array in weights(name, seed, **overrides).items()}
    values = config(name, style, dtype=dtype, **overrides)
    (path / "config.json").write_text(json.dumps(values, indent=2))
    if shards == 1:
        write_safetensors(path / "model.safetensors", arrays)
    else:
        keys, index = list(arrays), {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = keys[number::shards]
            write_safetensors(path / file, {key: arrays[key] for key in part})
            index |= dict.fromkeys(part, file)
        total = sum(array.nbytes for array in arrays.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (path / "model.safetensors.index.json").write_text(text)
    (path / "tokenizer.json").write_text(tokenizer_json())
    (path / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(), indent=2))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0]}))
    return path


def _tokenizer_config() -> dict[str, Any]:
    added = {str(index): {"content": token, "special": True} for index, token in enumerate(SPECIAL)}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "unk_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(tensor: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if tensor in _GGUF_GLOBAL:
        return _GGUF_GLOBAL[tensor]
    _, _, layer, rest = tensor.split(".", 3)
    stem, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_LAYER[stem]}.{suffix}"


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rotary rows -> the interleaved rows of llama.cpp's llama architecture."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def llama3_factors(head_dim: int, theta: float, rope: Mapping[str, Any]) -> np.ndarray:
    """The divisors of llama3 scaling, one a frequency, as llama.cpp's converter stores them in rope_freqs.weight."""
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        blended = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if wavelength < high else rope["factor"] if wavelength > low else blended)
    return np.array(factors, np.float32)


def write_gguf(path: Path, name: str, seed: int = 0, *, quantization: str = "F32", **overrides: Any) -> Path:
    """The same model as one GGUF file; matrices in `quantization`, vectors in F32, as llama.cpp writes them."""
    import gguf
    from gguf.quants import quantize

    c = config(name, **overrides)
    rope = c["rope_parameters"]
    arch = {"mistral": "llama"}.get(c["model_type"], c["model_type"])
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name(f"tiny {name}")
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_rope_dimension_count(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if c.get("sliding_window"):
        writer.add_sliding_window(c["sliding_window"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(c["head_dim"], rope["rope_theta"], rope))
    _add_tokenizer(writer)
    kind = gguf.GGMLQuantizationType[quantization]
    for tensor, array in weights(name, seed, **overrides).items():
        if arch == "llama" and (".q_proj." in tensor or ".k_proj." in tensor):
            array = permute(array, c["num_attention_heads" if ".q_proj." in tensor else "num_key_value_heads"])
        if array.ndim == 1:
            writer.add_tensor(gguf_name(tensor), np.ascontiguousarray(array))
        else:
            writer.add_tensor(gguf_name(tensor), quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
