"""Engines beside ours: transformers in a venv of its own and run in the same minutes; llama.cpp's figures, quoted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import typer

from cutaway.bench import report
from cutaway.core.errors import CutawayError

SCRIPT = "benchmarks/peers/transformers_cpu.py"
TORCH = "torch==2.13.0"
PACKAGES = ("transformers==5.24.0", "gguf", "sentencepiece", "accelerate")
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"

QUOTED_NOTE = (
    "llama.cpp: llama-bench and llama-server figures for SmolLM2-135M on 2 cores of Zen 4 (AVX512, VNNI, BF16), "
    "2 threads, tokens/s; quoted, not measured here"
)
QUOTED = (
    ("", "prefill 512", "decode, 1", "8 rows", "16 rows"),
    ("llama.cpp Q4_1 (the built-in file)", "340", "149", "204", "224"),
    ("llama.cpp BF16", "971", "111", "336", "450"),
    ("llama-server Q4_1, HTTP, wall with prefill", "345", "107", "120", "131"),
    ("llama-server BF16, HTTP, wall with prefill", "749", "91", "204", "254"),
)


def home() -> Path:
    return Path(os.environ.get("CUTAWAY_HOME") or Path.home() / ".cache" / "cutaway")


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def _run(*command: str | Path) -> bool:
    return subprocess.run([str(c) for c in command], check=False).returncode == 0


def prepare(venv: Path | None) -> Path:
    """The Python of the peer's venv; the venv and its packages are made where they are missing (a few hundred MB)."""
    venv = venv or home() / "peers" / "transformers"
    python = python_of(venv)
    if python.is_file() and _run(python, "-c", "import torch, transformers, gguf"):
        return python
    typer.echo(f"installing transformers and torch in {venv}")
    if not python.is_file() and not _run(sys.executable, "-m", "venv", venv):
        raise CutawayError(f"cannot make a virtual environment in {venv}: name another with --peer-venv")
    pip = (python, "-m", "pip", "install", "--quiet")
    # PyTorch's own CPU wheels where they can be reached: the general ones are many times their size.
    if not _run(*pip, "--retries", "0", "--timeout", "10", "--index-url", CPU_WHEELS, TORCH) and not _run(*pip, TORCH):
        raise CutawayError(f"cannot install {TORCH} in {venv}: see pip's message above, or name a venv with --peer-venv")
    if not _run(*pip, *PACKAGES):
        raise CutawayError(f"cannot install transformers in {venv}: see pip's message above, or name a venv with --peer-venv")
    return python


@dataclass(slots=True)
class Transformers:
    """A transformers process that stays loaded between measurements."""

    process: subprocess.Popen[str]
    versions: dict[str, Any]

    @classmethod
    def start(cls, python: Path, model: Path, dtype: str, threads: int | None) -> Transformers:
        folder = report.root()
        if folder is None:
            raise CutawayError(f"--peer needs a checkout: it runs {SCRIPT}")
        threads = threads or report.cores()
        command = [python, folder / SCRIPT, model, "--dtype", dtype, "--threads", str(threads)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        peer = cls(process, {})
        peer.versions = peer._read()
        return peer

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise CutawayError(f"transformers ended with {self.process.wait()}; run {SCRIPT} by hand to see why")
        return json.loads(line)

    def ask(self, op: str, **values: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **values}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def prefill(self, ids: Sequence[int], attention: str) -> float:
        return self.ask("prefill", ids=list(ids), attention=attention)["seconds"]

    def decode(self, rows: Sequence[Sequence[int]], steps: int, attention: str) -> float:
        return self.ask("decode", rows=[list(r) for r in rows], steps=steps, attention=attention)["seconds"]

    def generate(self, rows: Sequence[Sequence[int]], tokens: int, attention: str) -> float:
        return self.ask("generate", rows=[list(r) for r in rows], tokens=tokens, attention=attention)["seconds"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
