"""Each part, replaced by a copy of its own file in a running server: the copy does the work, the answers stay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rigs import gone_within

import tiny
from cutaway.engine.config import EngineConfig
from cutaway.engine.parts import PARTS, load_module

# A call that every request makes, in each part.
CALLS = {
    "blocks": "BlockTable.extend",
    "attention": "paged_attention",
    "prefix_cache": "PrefixCache.lookup",
    "scheduler": "Scheduler.schedule",
    "chunked": "split",
    "sampler": "sample",
    "detokenizer": "Detokenizer.push",
    "async_engine": "AsyncEngine.generate",
    "metrics": "Metrics.finished",
}
NOTED = """


def _noted(function):
    def call(*args, **kwargs):
        with open({log!r}, "a") as log:
            print("called", file=log)
        return function(*args, **kwargs)

    return call


{call} = _noted({call})
"""
TORCH = "cutaway.backends.torch.runner:create"
FAKE = "cutaway.backends.fake:create"
SERVE = """
import sys
import msgspec
from cutaway.engine.config import EngineConfig
from cutaway.server.serve import serve
serve(msgspec.json.decode(sys.argv[1], type=EngineConfig), port=0)
"""
PROMPTS = ["the quick brown fox", "of which there would be some time to say what is more than the other way of it"]


def copy_of(part: str, folder: Path) -> str:
    """A copy of the part's file that notes its calls in `<part>.log`."""
    source = load_module(PARTS[part].default).__file__
    assert source is not None
    file = folder / f"{part}.py"
    file.write_text(Path(source).read_text() + NOTED.format(log=str(folder / f"{part}.log"), call=CALLS[part]))
    return str(file)


@dataclass
class Answers:
    texts: list[str]
    tokens: list[list[str]]
    usage: list[dict[str, Any]]
    health: dict[str, Any]


@contextmanager
def server(model: Path, backend: str, parts: dict[str, str]) -> Iterator[str]:
    config = EngineConfig(
        model=str(model), backend=backend, parts=parts, dtype="fp32", kv_blocks=129, max_num_seqs=4,
        max_num_batched_tokens=32, threads=1,
    )  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUTAWAY_FAKE_VOCABULARY": str(tiny.VOCABULARY), "CUTAWAY_DEBUG": "1"}
    command = [sys.executable, "-c", SERVE, msgspec.json.encode(config).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            page = next((line for line in process.stdout if line.split()[:1] == ["Page"]), "")
            assert "http://" in page
            yield page.split()[1].rstrip("/")
        finally:
            process.terminate()
            assert gone_within(process.pid, 20) or process.kill()
    assert process.returncode == 0


def answers(model: Path, backend: str, parts: dict[str, str]) -> Answers:
    """What a server says to all prompts twice, the second time with its prefix cache warm."""
    with server(model, backend, parts) as url, httpx.Client(base_url=url, timeout=30) as client:
        got = Answers([], [], [], {})
        for prompt in PROMPTS * 2:
            body = {
                "model": model.stem,
                "prompt": prompt,
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 1,
            }
            reply = client.post("/v1/completions", json=body | {"model": model.stem})
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            got.texts.append(choice["text"])
            got.tokens.append(choice["logprobs"]["tokens"])
            got.usage.append(reply.json()["usage"])
        got.health = client.get("/health").json()
        return got


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama")


@pytest.fixture(scope="module")
def reference(model: Path) -> dict[str, Answers]:
    """What the engine's own parts answer, by backend."""
    return {backend: answers(model, backend, {}) for backend in (FAKE, TORCH)}


def check(part: str, folder: Path, file: str, got: Answers, expected: Answers) -> None:
    assert (got.texts, got.tokens, got.usage) == (expected.texts, expected.tokens, expected.usage)
    entry = got.health["parts"][part]
    assert (entry["source"], entry["reference"], entry["reference_served"]) == (file, False, [])
    assert (folder / f"{part}.log").read_text().count("called") >= len(PROMPTS)


@pytest.mark.parametrize("part", list(PARTS))
def test_a_part_is_swapped(part: str, model: Path, reference: dict[str, Answers], tmp_path: Path) -> None:
    backend = TORCH if part in ("attention", "sampler") else FAKE
    file = copy_of(part, tmp_path)
    got = answers(model, backend, {part: file})
    check(part, tmp_path, file, got, reference[backend])
    others = {name: entry for name, entry in got.health["parts"].items() if name != part}
    assert all(entry["reference"] for entry in others.values())


def test_all_parts_are_swapped(model: Path, reference: dict[str, Answers], tmp_path: Path) -> None:
    files = {part: copy_of(part, tmp_path) for part in PARTS}
    got = answers(model, TORCH, files)
    for part, file in files.items():
        check(part, tmp_path, file, got, reference[TORCH])


def test_a_part_that_lacks_a_feature_is_helped_out(model: Path, reference: dict[str, Answers], tmp_path: Path) -> None:
    file = copy_of("sampler", tmp_path)
    Path(file).write_text(Path(file).read_text() + 'SUPPORTS = frozenset({"top_k"})\n')
    got = answers(model, TORCH, {"sampler": file})
    assert got.tokens == reference[TORCH].tokens
    assert got.health["parts"]["sampler"]["reference_served"] == ["logprobs"]
