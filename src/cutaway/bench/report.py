"""What a verb hands over: figures with all their samples, the machine they were taken on, a table and a JSON file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import typer

from cutaway.core.machine import cores

VERSIONS = ("cutaway", "torch", "numpy", "tokenizers", "uvicorn", "pyzmq")


@dataclass(slots=True)
class Figure:
    """One measured quantity. `gate`: the value it must reach, as `better` says; `floor`: share of what the machine can do."""

    name: str
    unit: str
    samples: list[float]
    better: Literal["higher", "lower"] = "higher"
    gate: float | None = None
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def passed(self) -> bool | None:
        if self.gate is None:
            return None
        return self.median >= self.gate if self.better == "higher" else self.median <= self.gate


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        fields = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.+)$", info.read_text(), re.MULTILINE))
        if "model name" in fields:
            return f"{fields['model name']} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"
    return platform.processor() or platform.machine()


def host_class() -> str:
    """A short name for machines like this one, for file names: the CPU's name and the cores this process may use."""
    name = re.sub(r"\(.*?\)|processor|cpu|@.*", "", cpu_model(), flags=re.IGNORECASE)
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{cores()}c"


def root() -> Path | None:
    """The checkout this package runs from, or None where it was installed by pip."""
    path = Path(__file__).resolve().parents[3]
    return path if (path / "benchmarks").is_dir() and (path / "pyproject.toml").is_file() else None


def commit() -> str:
    """The checkout's commit, with `-dirty` where its source differs from it."""
    folder = root()
    if folder is None:
        return "not a checkout"

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", "src") else "")


def versions(names: Sequence[str] = VERSIONS) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if value else "0"


def table(rows: Sequence[Sequence[str]], *, notes: bool = True) -> str:
    """Columns aligned by spaces: the first to the left, the last as well if it is `notes`, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {0, len(widths) - 1} if notes else {0}

    def aligned(row: Sequence[str]) -> str:
        cells = [cell.ljust(widths[i]) if i in left else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        return "  ".join(cells).rstrip()

    return "\n".join(aligned(row) for row in rows)


def figure_rows(figures: Sequence[Figure]) -> list[list[str]]:
    rows = [["", "median", "min", "max", "n", "unit", "gate", "note"]]
    for f in figures:
        sign = "≥" if f.better == "higher" else "≤"
        gate = "" if f.gate is None else f"{sign} {number(f.gate)} {'ok' if f.passed else 'MISSED'}"
        samples = f.samples
        rows.append(
            [f.name, number(f.median), number(min(samples)), number(max(samples)), str(len(samples)), f.unit, gate, f.note]
        )
    return rows


def result_path(verb: str, json_path: Path | None, quick: bool) -> Path | None:
    """Where the JSON goes: the path asked for, else the checkout's results; a quick run is not kept unless asked."""
    if json_path is not None or quick:
        return json_path
    folder = root()
    return (folder / "benchmarks" / "results" if folder else Path.cwd()) / f"{verb}-{host_class()}.json"


def finish(
    verb: str,
    figures: Sequence[Figure],
    *,
    json_path: Path | None,
    quick: bool,
    facts: Mapping[str, Any] | None = None,
    lines: Sequence[str] = (),
    failed: bool = False,
) -> None:
    """Writes the JSON, prints the table last. Raises typer.Exit(1) when `failed`, or when a gate is missed (not if quick)."""
    document = {
        "verb": verb,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["cutaway", *("PATH" if "/" in word else word for word in sys.argv[1:])]),
        "quick": quick,
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "facts": dict(facts or {}),
        "figures": [
            {"name": f.name, "unit": f.unit, "median": f.median, "samples": f.samples, "better": f.better, "gate": f.gate,
             "passed": f.passed, "note": f.note, **f.extra}
            for f in figures
        ],
    }  # fmt: skip
    path = result_path(verb, json_path, quick)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        typer.echo(f"written: {path}")
    typer.echo(f"{verb} · {cpu_model()}, {cores()} cores · commit {document['commit']}")
    for line in lines:
        typer.echo(line)
    if figures:
        typer.echo(table(figure_rows(figures)))
    if failed or (not quick and any(f.passed is False for f in figures)):
        raise typer.Exit(1)
