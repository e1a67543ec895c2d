"""Files that are damaged or made to do harm: one line, no traceback, no hang, no memory to speak of."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from cutaway.checkpoints import open_checkpoint
from cutaway.core.errors import CheckpointError, CutawayError
from cutaway.text.chat import ChatTemplate
from cutaway.text.tokenizer import Tokenizer

HUGE = 1 << 60


def string(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def header(tensors: int, keys: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "short": (b"GGUF\x03", "is not a GGUF file"),
    "magic": (b"GGML" + bytes(40), "wrong magic"),
    "version 1": (header(0, 0, bytes(16), version=1), "GGUF version 1; versions 2 and 3 are supported"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(16), "big-endian GGUF file; convert it"),
    "2^60 tensors": (header(HUGE, 0), f"claims {HUGE} tensors"),
    "2^60 keys": (header(0, HUGE), f"claims 0 tensors and {HUGE} keys"),
    "many keys, no bytes": (header(0, 60_000), "the file ends inside a metadata key"),
    "many tensors, no bytes": (header(60_000, 0), "the file ends inside a tensor's name"),
    "key of 2^60": (header(0, 1, struct.pack("<Q", HUGE)), "a metadata key claims"),
    "string of 2^60": (header(0, 1, key("a", 8, struct.pack("<Q", HUGE))), "metadata 'a' claims"),
    "string past the end": (header(0, 1, key("a", 8, struct.pack("<Q", 1000))), "the file ends inside metadata 'a'"),
    "2^60 strings": (header(0, 1, key("a", 9, array(8, HUGE))), "metadata 'a' claims"),
    "strings of 20 MiB in all": (
        header(0, 20, b"".join(key(f"{index}", 8, string(b"a" * (1 << 20))) for index in range(20))),
        "at most 16777216 are allowed",
    ),
    "2^60 numbers": (header(0, 1, key("a", 9, array(4, HUGE))), "metadata 'a' claims"),
    "strings that overrun": (
        header(0, 1, key("a", 9, array(8, 2, string("x") + struct.pack("<Q", 99)))),
        "the file ends inside",
    ),
    "string in array of 2^60": (header(0, 1, key("a", 9, array(8, 1, struct.pack("<Q", HUGE)))), "holds a string of"),
    "nested arrays": (header(0, 1, key("a", 9, array(9, 1, array(9, 1)))), "is an array of value type 9"),
    "unknown value type": (header(0, 1, key("a", 77, b"")), "unknown value type 77"),
    "key twice": (header(0, 2, key("a", 0, b"1") * 2), "metadata key 'a' appears twice"),
    "key not utf-8": (header(0, 1, key("a", 8, string(b"\xff\xfe"))), "not valid UTF-8"),
    "alignment 3": (header(0, 1, key("general.alignment", 4, struct.pack("<I", 3))), "general.alignment is '3'"),
    "alignment 0": (header(0, 1, key("general.alignment", 4, struct.pack("<I", 0))), "general.alignment is '0'"),
    "no dimensions": (header(1, 0, tensor("t", [])), "0 dimensions"),
    "nine dimensions": (header(1, 0, tensor("t", [1] * 9)), "9 dimensions"),
    "2^32 dimensions": (header(1, 0, string("t") + struct.pack("<I", 0xFFFFFFFF)), "4294967295 dimensions"),
    "zero size": (header(1, 0, tensor("t", [0, 4])), "shape [4, 0]"),
    "overflowing shape": (header(1, 0, tensor("t", [1 << 33, 1 << 33])), "it is truncated or damaged"),
    "shape of 2^64": (header(1, 0, tensor("t", [1 << 32, 1 << 32, 1 << 32, 1 << 32])), "it is truncated or damaged"),
    "unknown type": (header(1, 0, tensor("t", [4], kind=999)), "unknown ggml type 999"),
    "partial block": (header(1, 0, tensor("t", [33], kind=2)), "which Q4_0 (blocks of 32) cannot hold"),
    "offset past the end": (header(1, 0, tensor("t", [4], offset=1 << 50) + bytes(64)), "it is truncated or damaged"),
    "offset 2^64 - 32": (header(1, 0, tensor("t", [4], offset=(1 << 64) - 32) + bytes(64)), "it is truncated or damaged"),
    "offset unaligned": (header(1, 0, tensor("t", [4], offset=7) + bytes(64)), "not a multiple of 32"),
    "tensors that overlap": (header(2, 0, tensor("t", [16]) + tensor("u", [16], offset=32) + bytes(256)), "overlaps"),
    "tensor twice": (header(2, 0, tensor("t", [4]) * 2 + bytes(64)), "tensor 't' appears twice"),
    "no architecture": (header(0, 0, bytes(8)), "'general.architecture' is missing"),
    "architecture is a number": (header(0, 1, key("general.architecture", 4, bytes(4))), "should be str"),
    "one part of three": (header(0, 1, key("split.count", 2, struct.pack("<H", 3))), "is one of 3 parts of a model"),
    "no tensors": (header(0, 1, key("general.architecture", 8, string("llama"))), "'token_embd.weight' is missing"),
}


@pytest.mark.parametrize("case", GGUF)
def test_a_hostile_gguf_gets_one_line(tmp_path: Path, case: str) -> None:
    data, message = GGUF[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def safetensors(value: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: Any = (4,), dtype: Any = "F32", offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "short": (b"abc", "it is too short"),
    "header longer than the file": (safetensors({}, length=HUGE), f"claims {HUGE} bytes"),
    "header larger than allowed": (safetensors(b" " * (3 << 20)), "at most 2097152 are allowed"),
    "not json": (safetensors(b"{]"), "not valid JSON"),
    "not utf-8": (safetensors(b'{"\xff": 1}'), "not valid JSON"),
    "deep": (safetensors(b"[" * 100_000), "not valid JSON"),
    "list": (safetensors([1, 2]), "not a JSON object"),
    "name twice": (safetensors(b'{"a": 1, "a": 2}'), "names a tensor twice"),
    "no object": (safetensors({"a": 1}), "tensor 'a' is not described"),
    "no dtype": (safetensors({"a": {}}), "tensor 'a' has no dtype"),
    "negative size": (safetensors({"a": entry([-4])}, bytes(16)), "not a short list of whole numbers"),
    "float size": (safetensors({"a": entry([4.0])}, bytes(16)), "not a short list of whole numbers"),
    "size true": (safetensors({"a": entry([True])}, bytes(16)), "not a short list of whole numbers"),
    "a thousand dimensions": (safetensors({"a": entry([1] * 1000)}, bytes(16)), "not a short list of whole numbers"),
    "overflowing shape": (safetensors({"a": entry([1 << 40, 1 << 40])}, bytes(16)), "takes"),
    "huge integer": (safetensors(b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}"), "not valid JSON"),
    "offsets past the end": (safetensors({"a": entry(offsets=[0, 1 << 40])}, bytes(16)), "it is truncated or damaged"),
    "offsets reversed": (safetensors({"a": entry(offsets=[16, 0])}, bytes(16)), "lies at 16..0"),
    "offsets that disagree": (safetensors({"a": entry(offsets=[0, 12])}, bytes(16)), "has 12 bytes, but F32 [4] takes 16"),
    "three offsets": (safetensors({"a": entry(offsets=[0, 1, 2])}, bytes(16)), "no pair of data_offsets"),
    "overlap": (safetensors({"a": entry(), "b": entry(offsets=[8, 24])}, bytes(32)), "overlaps"),
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_hostile_safetensors_file_gets_one_line(tmp_path: Path, case: str) -> None:
    data, message = SAFETENSORS[case]
    folder = tiny.write_folder(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert message in str(caught.value) and "model.safetensors" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "width"), [("F8_E4M3", 1), ("I64", 8), ("F64", 8), ("nonsense\nline", 4)], ids=["f8", "i64", "f64", "nonsense"]
)
def test_dtypes_that_are_not_supported_are_named(tmp_path: Path, dtype: str, width: int) -> None:
    folder = tiny.write_folder(tmp_path, "llama")
    arrays = tiny.weights("llama")
    names, at = {}, 0
    for name, values in arrays.items():
        kind, size = (dtype, values.size * width) if name == "model.norm.weight" else ("F32", values.nbytes)
        names[name], at = entry(list(values.shape), kind, [at, at + size]), at + size
    (folder / "model.safetensors").write_bytes(safetensors(names, bytes(at)))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "model.norm.weight" in str(caught.value) and "supported: F32, F16, BF16" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (lambda names: None, "has no weight_map"),
        (lambda names: {}, "has no weight_map"),
        (
            lambda names: dict.fromkeys(names, "../outside.safetensors"),
            "as a shard; a file name ending in .safetensors is needed",
        ),
        (lambda names: dict.fromkeys(names, "/etc/passwd"), "as a shard"),
        (lambda names: dict.fromkeys(names, 7), "as a shard"),
        (lambda names: {name: ["x"] for name in names}, "as a shard"),
        (lambda names: dict.fromkeys(names, "missing.safetensors"), "names the shard missing.safetensors, which is missing"),
        (lambda names: names | {"ghost": "model-00001-of-00002.safetensors"}, "places tensor 'ghost'"),
        (lambda names: dict(list(names.items())[1:]), "which the index places elsewhere"),
    ],
)
def test_a_bad_index_gets_one_line(tmp_path: Path, weight_map: Callable[[Any], Any], message: str) -> None:
    folder = tiny.write_folder(tmp_path / "m", "llama", shards=2)
    (tmp_path / "outside.safetensors").write_bytes(safetensors({}))
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map(names)}))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 200_000, b'{"a": ' * 50_000, b" " * (3 << 20)])
def test_json_files_that_are_none(tmp_path: Path, file: str, text: bytes) -> None:
    folder = tiny.write_folder(tmp_path, "llama")
    (folder / file).write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert file in str(caught.value) and "\n" not in str(caught.value)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"has no config.json, so it is not a model's folder$"):
        open_checkpoint(tmp_path)
    tiny.write_gguf(tmp_path / "a.gguf", "llama")
    assert open_checkpoint(tmp_path).kind == "gguf"
    tiny.write_gguf(tmp_path / "b.gguf", "llama")
    with pytest.raises(CheckpointError, match=r"give the path of one of its 2 .gguf files"):
        open_checkpoint(tmp_path)


def use(path: Path) -> None:
    """All that a start does with a model: open it, load every weight, build the tokenizer, render a chat."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        assert checkpoint.load(name, "bf16").data.shape == checkpoint.shape(name)
    assets = checkpoint.text()
    Tokenizer.open(assets).encode("the <|im_start|> of")
    ChatTemplate.open(assets).render([{"role": "user", "content": "hi"}])


def fails_in_one_line(path: Path) -> bool:
    """Whether using the model raises our error; any other exception goes through."""
    try:
        use(path)
    except CutawayError as error:
        message = str(error)
    else:
        return False
    assert message and "\n" not in message
    return True


def damaged(data: bytes, randomness: random.Random) -> bytes:
    """One of: cut short, some bytes changed, a run of bytes taken out, a count blown up. Mostly where the header is."""
    copy = bytearray(data)
    reach = min(len(copy), randomness.choice([64, 1024, len(copy)]))
    kind = randomness.randrange(4)
    if kind == 0:
        return bytes(copy[: randomness.randrange(reach)])
    if kind == 1:
        for _ in range(randomness.randrange(1, 8)):
            copy[randomness.randrange(reach)] = randomness.randrange(256)
    elif kind == 2:
        start = randomness.randrange(reach)
        del copy[start : start + randomness.randrange(1, 64)]
    else:
        start = randomness.randrange(max(1, reach - 8))
        copy[start : start + 8] = struct.pack("<Q", randomness.choice([0, 1, HUGE, (1 << 64) - 1, 1 << 31, len(copy)]))
    return bytes(copy)


@pytest.mark.parametrize("part", range(4))
def test_damaged_gguf_files_raise_nothing_but_our_errors(tmp_path: Path, part: int) -> None:
    data = tiny.write_gguf(tmp_path / "whole.gguf", "llama", quantization="Q8_0").read_bytes()
    path, failures = tmp_path / "m.gguf", 0
    for seed in range(100):
        path.write_bytes(damaged(data, random.Random(part * 1000 + seed)))
        failures += fails_in_one_line(path)
    assert failures > 50


@pytest.mark.parametrize("part", range(4))
def test_damaged_folders_raise_nothing_but_our_errors(tmp_path: Path, part: int) -> None:
    folder = tiny.write_folder(tmp_path / "m", "qwen2", shards=2)
    files = sorted(path for path in folder.iterdir() if path.name != "tokenizer.json")
    failures = 0
    for seed in range(100):
        randomness = random.Random(part * 1000 + seed)
        path = randomness.choice(files)
        data = path.read_bytes()
        path.write_bytes(damaged(data, randomness))
        failures += fails_in_one_line(folder)
        path.write_bytes(data)
    assert failures > 30


def test_a_file_cut_short_after_opening_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama")
    checkpoint = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="became shorter"):
        [checkpoint.load(name) for name in checkpoint.names()]
    folder = tiny.write_folder(tmp_path / "f", "llama")
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="became shorter"):
        checkpoint.load("lm_head.weight")


def test_weights_that_are_not_finite_load_as_they_are(tmp_path: Path) -> None:
    arrays = tiny.weights("llama")
    arrays["model.norm.weight"][:2] = [np.nan, np.inf]
    folder = tiny.write_folder(tmp_path, "llama")
    tiny.write_safetensors(folder / "model.safetensors", arrays)
    loaded = open_checkpoint(folder).load("model.norm.weight", "bf16").data
    assert loaded[0] == 0x7FC0 and loaded[1] == 0x7F80
