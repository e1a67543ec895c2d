"""GGUF files: header, names, layout and dequantized values, against the gguf package's own reader."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants

import tiny
from cutaway.checkpoints import hub, open_checkpoint
from cutaway.checkpoints.checkpoint import to_bf16
from cutaway.checkpoints.config import RopeScaling
from cutaway.checkpoints.gguf import GGUFCheckpoint, half_split_rows
from cutaway.checkpoints.gguf_header import GGML_TYPES, NOT_WEIGHTS, GGUFHeader
from cutaway.core.errors import CheckpointError

QUANTIZABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]
DEQUANTIZABLE = sorted(kind.name for kind in quants._type_traits)


def builtin() -> Path:
    model = hub.BUILTIN[0]
    return hub.models_folder() / model.file


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_architecture_gives_its_weights_under_hugging_face_names(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", name))
    expected = tiny.weights(name)
    assert sorted(checkpoint.names()) == sorted(expected)
    for tensor, array in expected.items():
        loaded = checkpoint.load(tensor)
        assert loaded.dtype == "f32" and loaded.data.flags.c_contiguous
        assert checkpoint.shape(tensor) == array.shape
        np.testing.assert_array_equal(loaded.data, array, err_msg=tensor)


def test_configurations_follow_from_metadata_and_tensors(tmp_path: Path) -> None:
    configs = {name: open_checkpoint(tiny.write_gguf(tmp_path / f"{name}.gguf", name)).config for name in tiny.NAMES}
    llama = configs["llama"]
    assert (llama.architecture, llama.hidden_size, llama.num_heads, llama.num_kv_heads, llama.head_dim) == (
        "llama",
        64,
        4,
        2,
        16,
    )
    assert (llama.vocab_size, llama.num_layers, llama.intermediate_size, llama.max_position) == (384, 2, 128, 512)
    assert llama.rms_eps == 1e-5 and llama.rope_theta == 10000.0 and llama.rope_scaling is None and not llama.tie_embeddings
    assert configs["llama-tied"].tie_embeddings
    assert configs["llama-linear"].rope_scaling == RopeScaling("linear", factor=2.0)
    yarn = configs["llama-yarn"].rope_scaling
    assert yarn is not None and (yarn.kind, yarn.factor, yarn.original_max_position) == ("yarn", 4.0, 128)
    assert yarn.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    factors = configs["llama3"].rope_scaling
    assert factors is not None and factors.kind == "factors" and len(factors.factors) == 8
    assert factors.factors[0] == 1.0 and factors.factors[-1] == 8.0
    assert configs["mistral"].sliding_windows == (16, 16)
    assert configs["qwen2"].qkv_bias and not configs["qwen2"].qk_norm
    assert configs["qwen3"].qk_norm and not configs["qwen3"].qkv_bias and configs["qwen3"].head_dim == 32


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_quantized_weights_equal_the_packages_dequantization(tmp_path: Path, kind: str) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", quantization=kind)
    checkpoint = open_checkpoint(path)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = quants.dequantize(tensor.data, tensor.tensor_type)
        name = next(n for n in checkpoint.names() if tiny.gguf_name(n) == tensor.name)
        for part, heads in ((".q_proj.", 4), (".k_proj.", 2)):
            if part in name:
                expected = expected[np.argsort(half_split_rows(heads, 16))]
        loaded = checkpoint.load(name, "f32")
        assert loaded.data.shape == expected.shape
        np.testing.assert_array_equal(loaded.data, expected, err_msg=name)
        np.testing.assert_array_equal(checkpoint.load(name, "bf16").data, tiny.to_bf16_bits(expected), err_msg=name)


@pytest.mark.parametrize("kind", DEQUANTIZABLE)
def test_every_type_the_package_dequantizes_is_read(tmp_path: Path, kind: str) -> None:
    """Random blocks of the type in place of one matrix; NaN and infinite scales included."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    plain = tiny.write_gguf(tmp_path / "plain.gguf", "qwen3", **sizes)
    qtype = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(7).integers(0, 256, (256, 256 // block * nbytes), dtype=np.uint8)
    path = replace_tensor(plain, tmp_path / "m.gguf", "blk.0.ffn_down.weight", raw, qtype)
    loaded = open_checkpoint(path).load("model.layers.0.mlp.down_proj.weight", "f32")
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, qtype)
    np.testing.assert_array_equal(loaded.data, expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_biases_of_a_llama_are_put_in_order_like_their_rows(tmp_path: Path, kind: str) -> None:
    path = tiny.write_gguf(tmp_path / "plain.gguf", "llama", num_hidden_layers=1)
    qtype, expected = gguf.GGMLQuantizationType[kind], {}
    for letter, heads in (("q", 4), ("k", 2), ("v", 0)):
        bias = np.random.default_rng(heads).standard_normal(16 * (heads or 2), dtype=np.float32)
        raw = quants.quantize(tiny.permute(bias, heads) if heads else bias, qtype)
        path = replace_tensor(path, tmp_path / f"{letter}.gguf", f"blk.0.attn_{letter}.bias", raw, qtype)
        stored = quants.dequantize(raw.view(np.uint8), qtype)
        expected[letter] = stored[np.argsort(half_split_rows(heads, 16))] if heads else stored
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.qkv_bias and not checkpoint.config.o_bias
    for letter, bias in expected.items():
        np.testing.assert_array_equal(checkpoint.load(f"model.layers.0.self_attn.{letter}_proj.bias", "f32").data, bias)


def replace_tensor(source: Path, target: Path, name: str, raw: np.ndarray, qtype: gguf.GGMLQuantizationType) -> Path:
    """A copy of a GGUF file with one tensor's data and type exchanged, or with one tensor more."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(target), reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        if tensor.name == name:
            writer.add_tensor(name, raw, raw_dtype=qtype)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    if name not in {tensor.name for tensor in reader.tensors}:
        writer.add_tensor(name, raw, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_the_type_table_is_the_packages() -> None:
    assert {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items() if int(kind) in GGML_TYPES} == {
        number: (block, nbytes) for number, (_, block, nbytes) in GGML_TYPES.items()
    }
    assert {int(kind) for kind in quants._type_traits} <= set(GGML_TYPES)
    known = {kind.name for kind in quants._type_traits} | {"F32", "F16"}
    assert {name for name, _, _ in GGML_TYPES.values()} - known == NOT_WEIGHTS


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path: Path) -> None:
    plain = tiny.write_gguf(tmp_path / "plain.gguf", "qwen3", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    raw = np.zeros((256, 292), np.uint8)
    path = replace_tensor(plain, tmp_path / "m.gguf", "blk.0.ffn_down.weight", raw, gguf.GGMLQuantizationType.Q8_K)
    with pytest.raises(CheckpointError, match=r"Q8_K"):
        open_checkpoint(path)


def test_opening_reads_no_weights_and_imports_no_dequantizer(tmp_path: Path) -> None:
    """The front opens checkpoints too, and starts faster without."""
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", quantization="Q4_0")
    code = "import sys; from pathlib import Path; from cutaway.checkpoints import open_checkpoint; "
    code += "open_checkpoint(Path(sys.argv[1])).text(); print('gguf' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_large_tensors_are_converted_in_slices_and_stay_exact(tmp_path: Path) -> None:
    """Rows that do not divide the slice, and bfloat16 ties."""
    path = tiny.write_gguf(
        tmp_path / "m.gguf", "llama", quantization="Q4_1", hidden_size=736, num_hidden_layers=1, intermediate_size=3232
    )
    checkpoint = open_checkpoint(path)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensor = reader["blk.0.ffn_up.weight"]
    expected = quants.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(checkpoint.load("model.layers.0.mlp.up_proj.weight").data, expected)
    bits = checkpoint.load("model.layers.0.mlp.up_proj.weight", "bf16")
    assert bits.dtype == "bf16" and bits.data.dtype == np.uint16
    np.testing.assert_array_equal(bits.data, tiny.to_bf16_bits(expected))


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0x7F800001], np.uint32).view(
        np.float32
    )
    out = np.empty(values.shape, np.uint16)
    to_bf16(values, out)
    assert [hex(bits) for bits in out] == ["0x3f80", "0x3f80", "0x3f82", "0x3f81", "0x7f80", "0xff80", "0x7fc0"]


def test_an_unsupported_architecture_is_named_with_what_is_supported(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'gemma3' is not supported; supported in GGUF: llama, qwen2, qwen3"):
        open_checkpoint(path)


def test_rope_kinds_that_are_not_known_are_named(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama-linear")
    data = path.read_bytes().replace(b"\x06\x00\x00\x00\x00\x00\x00\x00linear", b"\x06\x00\x00\x00\x00\x00\x00\x00dynamo")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="'dynamo' is not supported"):
        open_checkpoint(path)


def test_end_tokens_are_those_that_metadata_and_template_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", "llama"))
    assert checkpoint.generation.eos_ids == {2} and checkpoint.generation.bos_id == 1
    path = tmp_path / "eot.gguf"
    source = gguf.GGUFReader(tmp_path / "m.gguf")
    assert source.fields["tokenizer.ggml.eos_token_id"].contents() == 2
    data = (tmp_path / "m.gguf").read_bytes()
    key = b"tokenizer.ggml.eos_token_id\x04\x00\x00\x00"
    at = data.index(key) + len(key)
    path.write_bytes(data[:at] + b"\x00\x00\x00\x00" + data[at + 4 :])
    assert open_checkpoint(path).generation.eos_ids == {0, 2}  # the template ends turns with <|im_end|>, whatever eos says


@pytest.mark.model
def test_the_built_in_model_is_read_as_the_package_reads_it() -> None:
    checkpoint = GGUFCheckpoint(builtin())
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size) == (30, 576, 1536, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (9, 3, 64, 8192)
    assert (config.rope_theta, config.rms_eps, config.tie_embeddings) == (100000.0, 1e-5, True)
    assert checkpoint.generation.eos_ids == {2} and checkpoint.generation.bos_id == 1
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(builtin()).tensors}
    assert len(checkpoint.names()) == len(reader) == 272
    for name in ("model.embed_tokens.weight", "model.layers.29.mlp.down_proj.weight", "model.layers.7.input_layernorm.weight"):
        tensor = reader[tiny.gguf_name(name)]
        np.testing.assert_array_equal(checkpoint.load(name).data, quants.dequantize(tensor.data, tensor.tensor_type))
    tensor = reader["blk.3.attn_q.weight"]
    values = quants.dequantize(tensor.data, tensor.tensor_type)
    unpermuted = values.reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(576, 576)
    np.testing.assert_array_equal(checkpoint.load("model.layers.3.self_attn.q_proj.weight").data, unpermuted)


@pytest.mark.model
def test_the_built_in_header_is_parsed_without_building_its_vocabulary() -> None:
    times = []
    for _ in range(3):
        start = time.process_time()
        header = GGUFHeader(builtin())
        times.append(time.process_time() - start)
    assert min(times) < 3
    tokens = header.strings("tokenizer.ggml.tokens")
    assert len(tokens) == 49152 and tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(header.strings("tokenizer.ggml.merges")) == 48900


def test_the_file_is_closed_with_the_checkpoint(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        open_checkpoint(path)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "none.gguf")
    assert len(os.listdir("/proc/self/fd")) <= before
