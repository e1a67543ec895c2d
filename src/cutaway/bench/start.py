"""How long a person waits: from the start of `serve` to ready, and to the first token of an answer.

Each round starts a server of its own. Before a cold one the kernel is asked to drop its copies of the model's file and of the
packages' libraries, which is as near to a first start as a program without special rights comes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from cutaway.bench import http_client, report, served
from cutaway.bench.report import Figure
from cutaway.checkpoints import resolve
from cutaway.core.errors import CutawayError

GATE_S = 8.0
PACKAGES = ("torch", "numpy", "tokenizers", "pydantic_core", "zmq", "cutaway")


def files(model: str) -> list[Path]:
    """The model's files and everything of the packages that a start reads most of."""
    path = resolve(model)
    found = [path] if path.is_file() else [p for p in path.iterdir() if p.is_file()]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        for folder in spec.submodule_search_locations or () if spec else ():
            found += [p for p in Path(folder).rglob("*") if p.is_file()]
    return found


def drop(paths: Iterable[Path]) -> None:
    """Asks the kernel to forget its cached pages of these files; where it cannot be asked, nothing happens."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def once(model: str, arguments: Sequence[str]) -> dict[str, float]:
    """Seconds from exec to ready and to the first token; the engine's load time where /health tells it."""
    with served.serving(["--model", model, *arguments]) as server:
        prompt = [1] * 16
        asyncio.run(http_client.complete(server.port, server.model, prompt, 1))
        first = time.perf_counter() - server.began
        load = find_number(server.health(), "load_seconds")
    split = {"ready": server.ready_s, "first token": first}
    return split if load is None else {**split, "engine load": load}


def find_number(value: object, name: str) -> float | None:
    """The first number called `name` anywhere in nested JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            if key == name and isinstance(inner, (int, float)):
                return float(inner)
            if (found := find_number(inner, name)) is not None:
                return found
    return None


def import_seconds(module: str) -> float:
    """Cumulative import time of a module in a new interpreter, by -X importtime; 0 where it cannot be imported."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", f"import {module}"], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    found = re.search(rf"\|\s*(\d+) \| {re.escape(module)}$", done.stderr, re.MULTILINE)
    return int(found.group(1)) / 1e6 if found and done.returncode == 0 else 0.0


def run(model: str, rounds: int, json_path: Path | None, *, quick: bool, arguments: Sequence[str] = ()) -> None:
    """`arguments`: further ones for `serve`."""
    rounds = 1 if quick else rounds
    kept = files(model)
    samples: dict[str, list[float]] = {}
    for temperature in ("warm",) if quick else ("warm", "cold"):
        for turn in range(rounds + (not quick and temperature == "warm")):
            if temperature == "cold":
                drop(kept)
            result = once(model, arguments)
            typer.echo(f"{temperature}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.items()))
            if turn or quick or temperature == "cold":
                for name, seconds in result.items():
                    samples.setdefault(f"{name}, {temperature}", []).append(seconds)
    if not samples:
        raise CutawayError("no round was measured")
    figures = [Figure(name, "s", values, "lower", GATE_S if name.startswith("first token") else None)
               for name, values in samples.items()]  # fmt: skip
    for module in () if quick else ("cutaway.server.serve", "torch"):
        times = [import_seconds(module) for _ in range(3)]
        if any(times):
            figures.append(Figure(f"import {module}", "s", times, "lower", note="in a process of its own, warm"))
    report.finish("start", figures, json_path=json_path, quick=quick, facts={"model": model})
