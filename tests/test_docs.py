"""Numbers in the README are those of benchmarks/results, and its commands exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def figures(verb: str) -> dict[str, float]:
    file = ROOT / "benchmarks" / "results" / f"{verb}-amd-epyc-2c.json"
    return {f["name"]: f["median"] for f in json.loads(file.read_text())["figures"]}


def row(label: str) -> list[str]:
    return next(
        [cell.strip() for cell in line.split("|")[2:-1]] for line in README.splitlines() if line.startswith(f"| {label}")
    )


def three(value: float) -> str:
    """Three digits of a ratio or a time, whole numbers from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("prefill, 512 tokens", "prefill 512"),
        ("decode, 1 row", "decode, 1 row"),
        ("decode, 8 rows", "decode, 8 rows"),
        ("decode, 16 rows", "decode, 16 rows"),
        ("16 clients over HTTP", "16 clients over HTTP"),
    ],
)
def test_speeds_are_those_of_the_results(label: str, name: str) -> None:
    found = figures("cpu")
    ours = found[f"{name}: cutaway"]
    peers = [found[f"{name}: transformers, {kind}"] for kind in ("sdpa (its default)", "eager")]
    assert row(label) == [three(ours), *(f"{three(peer)} ({ours / peer:.2f}x)" for peer in peers)]


def test_the_other_figures_are_those_of_the_results() -> None:
    front, start, memory = figures("front"), figures("start"), figures("memory")
    assert row("the front's CPU time")[0] == f"{front['front, CPU time a token']:.3f} ms"
    assert row("start to first token")[0] == f"{start['first token, warm']:.1f} s, {start['first token, cold']:.1f} s from disk"
    idle, peak = memory["PSS of both, idle"], memory["PSS of both, peak under load"]
    assert row("memory of both")[0] == f"{idle:.0f} MB, {peak:.0f} MB (PSS)"


def test_invariance_is_what_its_result_says() -> None:
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "invariance-amd-epyc-2c.json").read_text())
    variants = result["facts"]["variants"]
    tokens, differing = (sum(v[key] for v in variants) for key in ("tokens", "differing"))
    assert row("greedy ids over")[0] == f"{differing} of {tokens:,} tokens differ"


def test_results_name_no_path_of_the_machine_that_made_them() -> None:
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert "/" not in json.loads(file.read_text())["command"], file.name


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document}: {target}"
