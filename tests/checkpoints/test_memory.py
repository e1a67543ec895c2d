"""Memory of a start with a hostile model: at most the files' size and 64 MiB above what the program had before."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from test_hostile import array, header, key, safetensors, string, tensor

import tiny

_MEASURE = """
import sys
from pathlib import Path
from cutaway.checkpoints import open_checkpoint
from cutaway.core.errors import CutawayError
from cutaway.core.text_assets import TextAssets, Vocabulary
from cutaway.text.chat import ChatTemplate
from cutaway.text.tokenizer import Tokenizer
import gguf.quants

def peak():  # of this program alone; getrusage would begin with that of the process that started it
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) << 10

before = peak()
try:
    assets = open_checkpoint(Path(sys.argv[1])).text()
    Tokenizer.open(assets).encode("the of and")
    ChatTemplate.open(assets).render([{"role": "user", "content": "hi"}])
    print("used")
except CutawayError as error:
    print("refused", error)
print(peak() - before)
"""


def many_keys() -> bytes:
    return header(0, 65_536, b"".join(key(f"{index:x}", 0, b"\x01") for index in range(65_536)))


def many_tensors() -> bytes:
    return header(65_536, 0, b"".join(tensor(f"{index:x}", [1], offset=index * 32) for index in range(65_536)))


def many_strings() -> bytes:
    count = 3 << 18
    strings = b"".join(string(b"%04x" % (index & 0xFFFF)) for index in range(count))
    keys = key("general.architecture", 8, string("llama")) + key("tokenizer.ggml.tokens", 9, array(8, count, strings))
    keys += key("tokenizer.chat_template", 8, string("<|im_end|>"))
    return header(0, 3, keys)


def wide_strings() -> bytes:
    """One character beyond the basic plane makes Python keep four bytes for each of the others."""
    text = string("\U0001f600" + "a" * (3 << 20))
    return header(0, 16, b"".join(key(f"{index}", 8, text) for index in range(16)))


def truncated() -> bytes:
    return header(1, 0, tensor("t", [1 << 20, 1 << 12]))


def nested_json() -> bytes:
    return safetensors(b'{"a":' + b"[" * 900 + b"]" * 900 + b',"b":[' + b"[]," * 690_000 + b"[]]}")


def words(letters: str, count: int) -> list[str]:
    """The first `count` words of these letters, shorter ones first: each is a union of two others in every way to cut it."""
    lengths = (itertools.product(letters, repeat=length) for length in itertools.count(1))
    return ["".join(word) for word in itertools.islice(itertools.chain.from_iterable(lengths), count)]


def strings(texts: Iterable[str]) -> bytes:
    items = [string(text) for text in texts]
    return array(8, len(items), b"".join(items))


def numbers(kind: int, form: str, values: list[Any]) -> bytes:
    return array(kind, len(values), struct.pack(f"<{len(values)}{form}", *values))


def with_text(path: Path, extra: dict[str, tuple[int, bytes]]) -> Path:
    """A tiny model's GGUF with other entries in its metadata and a vocabulary of any size (one embedding row a token)."""
    count = struct.unpack_from("<Q", extra["tokenizer.ggml.tokens"][1], 4)[0]
    sizes = {"block_count": 1, "embedding_length": 2, "attention.head_count": 1, "attention.head_count_kv": 1,
             "feed_forward_length": 2, "context_length": 64}  # fmt: skip
    entries = {f"llama.{name}": (4, struct.pack("<I", value)) for name, value in sizes.items()}
    entries |= {
        "general.architecture": (8, string("llama")),
        "llama.attention.layer_norm_rms_epsilon": (6, struct.pack("<f", 1e-5)),
    }
    entries |= extra
    shapes = {"token_embd.weight": [2, count], "output_norm.weight": [2]}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}.weight"] = [2, 2]
    shapes |= {"blk.0.attn_norm.weight": [2], "blk.0.ffn_norm.weight": [2]}
    directory, at = b"", 0
    for name, dims in shapes.items():
        directory += tensor(name, dims, 1, at)
        at += -(-2 * dims[0] * (dims[1] if len(dims) > 1 else 1) // 32) * 32
    body = b"".join(key(name, kind, value) for name, (kind, value) in entries.items())
    path.write_bytes(header(len(shapes), len(entries), body + directory) + bytes(at + 64))
    return path


def gguf_text(tokens: list[str], model: str, kind: int = 1, merges: list[str] | None = None, template: str = "") -> Any:
    extra = {
        "tokenizer.ggml.model": (8, string(model)),
        "tokenizer.ggml.pre": (8, string("gpt-2")),
        "tokenizer.ggml.tokens": (9, strings(tokens)),
        "tokenizer.ggml.token_type": (9, numbers(5, "i", [kind] * len(tokens))),
        "tokenizer.ggml.scores": (9, numbers(6, "f", [float(-index) for index in range(len(tokens))])),
    }
    if merges is not None:
        extra["tokenizer.ggml.merges"] = (9, strings(merges))
    if template:
        extra["tokenizer.chat_template"] = (8, string(template))
    return extra


MORE = "takes more memory than a model of this size should need"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a small one": (lambda: gguf_text(words("ab", 100), "llama", template="x"), "used"),
    "pieces of pieces": (lambda: gguf_text(words("ab", 60_000), "llama"), MORE),
    "many pieces": (lambda: gguf_text(words("abcd", 250_000), "llama"), MORE),
    "many byte-level tokens": (lambda: gguf_text(words("abcd", 500_000), "gpt2", merges=[]), MORE),
    "many merges": (lambda: gguf_text(words(LETTERS, 800), "gpt2", merges=["a b"] * 700_000), MORE),
    "many control tokens": (lambda: gguf_text(words("abcd", 80_000), "gpt2", kind=3, merges=[]), MORE),
    "long user-defined tokens": (
        lambda: gguf_text([word * 60 for word in words("abcd", 9000)], "gpt2", kind=4, merges=[]), MORE),
    "a long template": (lambda: gguf_text(words("ab", 100), "llama", template="{{ a + a + a }}" * 20_000), "at most 65536"),
    "a template that grows": (
        lambda: gguf_text(words("ab", 100), "llama", template="{{ 'a\nb' | indent(100000000) }}"), "indents by more than 8"),
}  # fmt: skip


def measure(path: Path) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    said, grown = done.stdout.splitlines()
    return said, int(grown)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")]


@pytest.mark.parametrize("make", [many_keys, many_tensors, many_strings, wide_strings, truncated, nested_json])
def test_headers_stay_within_the_files_size_and_64_mib(tmp_path: Path, make: Callable[[], bytes]) -> None:
    data, path = make(), tmp_path / "m.gguf"
    if make is nested_json:
        path = tiny.write_folder(tmp_path, "llama")
        (path / "model.safetensors").write_bytes(data)
    else:
        path.write_bytes(data)
    said, grown = measure(path)
    assert said.startswith("refused") and grown <= len(data) + (64 << 20)


@pytest.mark.parametrize("case", TEXTS)
def test_vocabularies_and_templates_stay_within_the_files_size_and_64_mib(tmp_path: Path, case: str) -> None:
    make, message = TEXTS[case]
    path = with_text(tmp_path / "m.gguf", make())
    said, grown = measure(path)
    assert message in said
    assert grown <= path.stat().st_size + (64 << 20)


def added(count: int, text: str) -> list[Any]:
    fixed = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": index, "content": f"{index:06x}{text}"} | fixed for index in range(count)]


FOLDERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "long added tokens": ("tokenizer.json", lambda value: value | {"added_tokens": added(4000, "abcdef" * 100)}),
    "many added tokens": ("tokenizer.json", lambda value: value | {"added_tokens": added(90_000, "")}),
    "many merges": (
        "tokenizer.json", lambda value: value | {"model": value["model"] | {"merges": [["a", "b"]] * 300_000}}),
    "a list": ("tokenizer.json", lambda value: value | {"model": value["model"] | {"vocab": [0] * 2_000_000}}),
    "lists in tokenizer_config.json": ("tokenizer_config.json", lambda value: value | {"x": [[]] * 500_000}),
    "lists in config.json": ("config.json", lambda value: value | {"x": [[]] * 500_000}),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_stay_within_the_files_size_and_64_mib(tmp_path: Path, case: str) -> None:
    folder = tiny.write_folder(tmp_path, "llama")
    name, change = FOLDERS[case]
    (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text())), separators=(",", ":")))
    said, grown = measure(folder)
    assert said.startswith("refused") or name == "tokenizer_config.json", said
    assert grown <= sum(file.stat().st_size for file in folder.iterdir()) + (64 << 20)
