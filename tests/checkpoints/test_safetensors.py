"""Hugging Face folders: weights in one file and in shards, configuration in the old and the new style."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import tiny
from cutaway.checkpoints import open_checkpoint
from cutaway.checkpoints.config import RopeScaling
from cutaway.checkpoints.parse import parse_config
from cutaway.core.errors import CheckpointError


@pytest.mark.parametrize("name", tiny.NAMES)
@pytest.mark.parametrize("shards", [1, 3])
def test_folders_give_their_weights(tmp_path: Path, name: str, shards: int) -> None:
    checkpoint = open_checkpoint(tiny.write_folder(tmp_path / "m", name, seed=5, shards=shards))
    expected = tiny.weights(name, seed=5)
    assert checkpoint.kind == "folder" and checkpoint.name == "m"
    assert sorted(checkpoint.names()) == sorted(expected)
    for tensor, array in expected.items():
        assert checkpoint.shape(tensor) == array.shape
        np.testing.assert_array_equal(checkpoint.load(tensor).data, array)


@pytest.mark.parametrize(("dtype", "word"), [("float32", "f32"), ("float16", "f16"), ("bfloat16", "bf16")])
def test_stored_dtypes_and_their_conversions(tmp_path: Path, dtype: str, word: str) -> None:
    checkpoint = open_checkpoint(tiny.write_folder(tmp_path, "qwen2", dtype=dtype))
    assert checkpoint.config.dtype == word
    for tensor, array in tiny.weights("qwen2").items():
        bits = tiny.to_bf16_bits(array)
        stored = {"f32": array, "f16": array.astype(np.float16), "bf16": bits}[word]
        as_f32 = {"f32": array, "f16": array.astype(np.float16).astype(np.float32), "bf16": _widen(bits)}[word]
        assert checkpoint.load(tensor).dtype == word
        np.testing.assert_array_equal(checkpoint.load(tensor).data, stored)
        np.testing.assert_array_equal(checkpoint.load(tensor, "f32").data, as_f32)
        np.testing.assert_array_equal(checkpoint.load(tensor, "bf16").data, tiny.to_bf16_bits(as_f32))


def test_files_of_the_library_are_read_as_it_reads_them(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, "llama")
    file = folder / "model.safetensors"
    arrays = {name: array.astype(np.float16) for name, array in safetensors.numpy.load_file(file).items()}
    safetensors.numpy.save_file(arrays, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.names()) == sorted(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.load(name).data, array)


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_old_and_new_style_configurations_are_the_same(name: str) -> None:
    new, old = tiny.config(name, "new"), tiny.config(name, "old")
    assert "rope_parameters" in new and "rope_theta" in old and new != old
    assert parse_config("new", new) == parse_config("old", old)


def parse(name: str = "llama", **changes: Any) -> Any:
    values = tiny.config(name, "old") | changes
    return parse_config("config.json", {key: value for key, value in values.items() if value is not ...})


def test_rope_scaling_of_each_kind() -> None:
    llama3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 8192
    assert parse(rope_scaling=llama3).rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert parse(rope_scaling={"type": "linear", "factor": 4.0}).rope_scaling == RopeScaling("linear", 4.0)
    yarn = parse(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    assert yarn.rope_scaling.attention_factor == pytest.approx(1.138629436)
    assert (yarn.rope_scaling.beta_fast, yarn.rope_scaling.beta_slow, yarn.max_position) == (32.0, 1.0, 2048)
    assert parse(rope_scaling={"rope_type": "default"}).rope_scaling is None
    new = parse(rope_parameters={"rope_type": "default", "rope_theta": 123456.0}, rope_theta=..., rope_scaling=...)
    assert new.rope_theta == 123456.0
    for kind in ("dynamic", "longrope", "mrope"):
        with pytest.raises(CheckpointError, match=rf"'{kind}' is not supported; supported: default, linear, llama3, yarn"):
            parse(rope_scaling={"rope_type": kind, "factor": 2.0})


def test_defaults_of_fields_that_old_files_lack() -> None:
    config = parse(head_dim=..., num_key_value_heads=..., tie_word_embeddings=..., torch_dtype=..., rope_theta=...)
    assert (config.head_dim, config.num_kv_heads, config.tie_embeddings) == (16, 4, False)
    assert (config.dtype, config.rope_theta) == ("f32", 10000.0)
    assert parse("qwen3", head_dim=...).head_dim == 128
    assert parse(architectures=...).architecture == "llama"


def test_biases() -> None:
    assert not parse().qkv_bias
    biased = parse(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.o_bias and biased.mlp_bias
    qwen = parse("qwen2")
    assert qwen.qkv_bias and not qwen.o_bias


def test_sliding_windows() -> None:
    assert parse("mistral").sliding_windows == (16, 16)
    assert parse("mistral", sliding_window=None).sliding_windows == ()
    assert parse("qwen2", sliding_window=8).sliding_windows == ()  # use_sliding_window is false
    on = {"sliding_window": 8, "use_sliding_window": True}
    assert parse("qwen2", **on, max_window_layers=1).sliding_windows == (0, 8)
    assert parse("qwen2", **on, max_window_layers=2).sliding_windows == ()
    assert parse("qwen3", **on, layer_types=["sliding_attention", "full_attention"]).sliding_windows == (8, 0)
    with pytest.raises(CheckpointError, match="layer type 'chunked_attention'"):
        parse("qwen3", **on, layer_types=["chunked_attention", "full_attention"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture 'GemmaForCausalLM' is not supported; supported: LlamaForCausalLM",
        ),
        ({"architectures": [], "model_type": "phi"}, "architecture 'phi' is not supported"),
        ({"hidden_size": "64"}, "hidden_size should be an integer"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": True}, "hidden_size should be an integer"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000; 1 to 4096 is allowed"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 key-value heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps should be a finite number"),
        ({"rms_norm_eps": 7}, "epsilon is 7"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized safetensors are not supported"),
        ({"rope_scaling": "yarn"}, "rope_scaling should be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "should be positive"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 1.0}}, "partial rotary"),
    ],
)
def test_bad_configurations_get_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(**changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_end_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, "llama", eos_token_id=7)
    assert open_checkpoint(folder).generation.eos_ids == {7, 2, 0}  # config, tokenizer, generation_config
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "temperature": "hot"}))
    assert open_checkpoint(folder).generation.eos_ids == {7, 2, 9}
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).generation.eos_ids == {7, 2}


def test_a_tied_model_may_carry_a_copy_of_its_head(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, "llama-tied")
    arrays = tiny.weights("llama-tied")
    arrays |= {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    arrays |= {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    tiny.write_safetensors(folder / "model.safetensors", arrays)
    assert "lm_head.weight" not in open_checkpoint(folder).names()


def test_a_weight_that_would_be_ignored_is_an_error(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, "llama")
    arrays = tiny.weights("llama") | {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}
    tiny.write_safetensors(folder / "model.safetensors", arrays)
    with pytest.raises(CheckpointError, match=r"q_proj.bias' has no place in architecture 'llama'"):
        open_checkpoint(folder)


def test_shapes_that_disagree_name_tensor_and_both_shapes(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, "llama")
    arrays = tiny.weights("llama")
    arrays["model.layers.1.mlp.up_proj.weight"] = np.zeros((64, 128), np.float32)
    tiny.write_safetensors(folder / "model.safetensors", arrays)
    with pytest.raises(
        CheckpointError, match=r"'model.layers.1.mlp.up_proj.weight' has shape \[64, 128\], .* asks for \[128, 64\]"
    ):
        open_checkpoint(folder)
    del arrays["model.layers.1.mlp.up_proj.weight"]
    tiny.write_safetensors(folder / "model.safetensors", arrays)
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.1.mlp.up_proj.weight' is missing"):
        open_checkpoint(folder)


def test_dummy_weights_need_a_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("llama", dtype="bfloat16")))
    checkpoint = open_checkpoint(tmp_path, load_format="dummy")
    name = "model.layers.0.mlp.up_proj.weight"
    first, again = checkpoint.load(name, "f32"), open_checkpoint(tmp_path, load_format="dummy").load(name, "f32")
    np.testing.assert_array_equal(first.data, again.data)
    assert first.data.shape == (128, 64) and 0.0009 < np.abs(first.data).max() <= 0.001
    assert checkpoint.load(name).dtype == "bf16"
    assert set(checkpoint.names()) == set(tiny.weights("llama"))
    assert (checkpoint.load("model.norm.weight", "f32").data == 1).all()
    with pytest.raises(CheckpointError, match=r"has no model.safetensors"):
        open_checkpoint(tmp_path)
