"""What a failing disk, an old library and a link to a file give; what a config.json that leaves keys out means."""

from __future__ import annotations

import errno
import os
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import pytest

import tiny
from cutaway.checkpoints import open_checkpoint
from cutaway.checkpoints.gguf import _quantized  # pyright: ignore[reportPrivateUsage]
from cutaway.checkpoints.gguf_header import TensorInfo
from cutaway.checkpoints.parse import parse_config
from cutaway.core.errors import CheckpointError


def broken(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_disk_that_fails_is_one_line_with_file_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = tiny.write_folder(tmp_path / "m", "llama")
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama") if kind == "gguf" else folder
    file = path if kind == "gguf" else folder / "model.safetensors"
    checkpoint = open_checkpoint(path)
    expected = f"{file}: cannot be read: Input/output error"
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        for dtype in (None, "bf16"):
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load("model.norm.weight", dtype)
            assert str(caught.value) == expected
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(caught.value) == expected


def test_a_disk_that_fails_under_a_json_file_or_a_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.write_folder(tmp_path, "llama")
    (folder / "chat_template.jinja").write_text("x")
    checkpoint = open_checkpoint(folder)
    monkeypatch.setattr(Path, "read_text", broken)
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: cannot be read: Input/output error"):
        checkpoint.text()
    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read: Input/output error"):
        open_checkpoint(folder)


def test_a_type_that_an_older_gguf_package_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(IntEnum):
        F32 = 0

    monkeypatch.setattr(gguf, "GGMLQuantizationType", Older)
    with pytest.raises(CheckpointError) as caught:
        _quantized(Path("m.gguf"), TensorInfo("blk.0.ffn_up.weight", (1, 64), 40, 0, 36))
    expected = "m.gguf: tensor 'blk.0.ffn_up.weight' has ggml type 40 (NVFP4), which cannot be dequantized"
    assert str(caught.value) == expected


def test_a_link_gives_a_model_its_own_name(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    tiny.write_gguf(blobs / "0123abcd", "llama")
    (tmp_path / "tiny-q8.gguf").symlink_to(blobs / "0123abcd")
    assert open_checkpoint(tmp_path / "tiny-q8.gguf").name == "tiny-q8"
    tiny.write_folder(blobs / "4567", "llama")
    (tmp_path / "tiny-llama").symlink_to(blobs / "4567")
    assert open_checkpoint(tmp_path / "tiny-llama").name == "tiny-llama"


def config(family: str, **changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 32, "vocab_size": 100}
    return parse_config("config.json", {"model_type": family, "head_dim": 2} | sizes | changes)


def test_keys_that_are_left_out_have_the_defaults_of_the_familys_class() -> None:
    found = {family: config(family) for family in ("llama", "mistral", "qwen2", "qwen3")}
    assert [found[family].max_position for family in found] == [2048, 131_072, 32_768, 32_768]
    assert [found[family].num_kv_heads for family in found] == [32, 8, 32, 32]
    assert [found[family].sliding_windows for family in found] == [(), (4096, 4096), (), ()]
    assert config("mistral", sliding_window=None).sliding_windows == ()
    assert config("mistral", num_key_value_heads=None).num_kv_heads == 32
    assert config("qwen2", use_sliding_window=True, max_window_layers=1).sliding_windows == (0, 4096)
    assert config("qwen2", use_sliding_window=True, max_window_layers=1, sliding_window=None).sliding_windows == ()


def test_a_context_beyond_reason_is_refused() -> None:
    assert config("llama", max_position_embeddings=1 << 24).max_position == 1 << 24
    with pytest.raises(CheckpointError, match="max_position is 16777217; 1 to 16777216 is allowed"):
        config("llama", max_position_embeddings=(1 << 24) + 1)


def test_every_word_of_a_long_read_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may hand over fewer bytes than were asked for."""
    checkpoint = open_checkpoint(tiny.write_folder(tmp_path, "llama"))
    whole = checkpoint.load("lm_head.weight").data
    read = os.preadv

    def little(file: int, views: list[memoryview], at: int) -> int:
        return read(file, [views[0][:1000]], at)

    monkeypatch.setattr(os, "preadv", little)
    np.testing.assert_array_equal(checkpoint.load("lm_head.weight").data, whole)


def test_the_text_side_is_in_proportion_to_a_models_weights_where_there_are_any(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, "llama")
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert open_checkpoint(folder).text().room == size + (40 << 20)
    assert open_checkpoint(folder, "dummy").text().room is None
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama")
    assert open_checkpoint(path).text().room == path.stat().st_size + (40 << 20)
