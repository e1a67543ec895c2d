"""The table stage x checks x numbers x verdicts, and of which fault is caught by which check: as JSON and to be read."""

from __future__ import annotations

import datetime
import json
import math
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course.runner.checking import Measure, Result
from course.runner.declaration import ROOT, Track
from course.runner.environment import card, processor
from course.runner.report import headline
from course.runner.terminal import figure, gate_of

if TYPE_CHECKING:
    from course.runner.proving import Proof

RESULTS = ROOT / "benchmarks" / "results"


def machine(gpu: bool) -> dict[str, Any]:
    """What was measured on. name: short, for file names."""
    cpu, cores = processor()
    gpu_name = card()[0] if gpu else ""
    short = re.sub(r"\(.*?\)|processor|cpu|@.*", "", gpu_name or cpu, flags=re.IGNORECASE)
    name = re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")
    return {
        "name": name if gpu_name else f"{name}-{cores}c",
        "cpu": cpu,
        "cores": cores,
        "gpu": gpu_name,
        "system": f"{platform.system()} {platform.release()}",
    }


def told(result: Result) -> dict[str, Any]:
    measures = [
        {"name": m.name, "value": m.value if math.isfinite(m.value) else None, "unit": m.unit, "gate": m.gate,
         "baseline": m.baseline, "against": m.against}
        for m in result.measures
    ]  # fmt: skip
    return {"name": result.name, "claim": result.claim, "verdict": result.verdict, "reason": result.reason,
            "seconds": round(result.seconds, 3), "measures": measures}  # fmt: skip


def write(proofs: list[Proof], track: Track, gpu: bool, folder: Path = RESULTS) -> list[Path]:
    """Writes both files; answers their paths."""
    here = machine(gpu)
    stages = [{"stage": p.stage.id, "title": p.stage.title, "seconds": round(p.seconds, 1),
               "checks": [told(r) for r in p.answers],
               "faults": p.caught, "complaints": p.complaints} for p in proofs]  # fmt: skip
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"ladder-{here['name']}.json"
    whole = {"command": "vc verify --full", "machine": here, "date": date, "track": track, "stages": stages}
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    readable = path.with_suffix(".md")
    readable.write_text("\n".join(_readable(proofs, here, date)) + "\n", encoding="utf-8")
    return [path, readable]


# --- to be read ---------------------------------------------------------------------------------------------------------


def _readable(proofs: list[Proof], here: dict[str, Any], date: str) -> list[str]:
    results = [r for p in proofs for r in p.answers]
    count = {v: sum(r.verdict == v for r in results) for v in ("passed", "failed", "not measured")}
    measured = sum(bool(r.measures) for r in results)
    faults = sum(len(p.caught) for p in proofs)
    on = f"{here['gpu']}, {here['cpu']}" if here["gpu"] else here["cpu"]
    lines = [
        "# The ladder's answers through its checks",
        "",
        f"`./vc verify --full` on {on}, {here['cores']} cores, {date}.",
        f"{len(results)} checks: {count['passed']} passed, {count['failed']} failed, {count['not measured']} not measured;"
        f" {measured} carry a number of this run. {faults} planted faults, each run against all checks of its stage.",
        "",
        *_table(
            ["stage", "", "checks", "passed", "failed", "not measured", "faults", "caught", "s"], [_summary(p) for p in proofs]
        ),
    ]
    complaints = [f"- stage {p.stage.id}: {_cell(complaint)}" for p in proofs for complaint in p.complaints]
    lines += ["", "## What is wrong", "", *complaints] if complaints else []
    lines += ["", "# Checks, numbers, verdicts"]
    for p in proofs:
        lines += ["", f"## {p.stage.id} {p.stage.title}", "", *_checks(p)]
    lines += ["", "# Planted faults, and the checks that catch them"]
    for p in proofs:
        faults_of = [_fault(fault, caught) for fault, caught in p.caught.items()] or [["none", "", ""]]
        lines += ["", f"## {p.stage.id} {p.stage.title}: faults", "", *_table(["planted fault", "by", "caught by"], faults_of)]
    return lines


def _summary(p: Proof) -> list[str]:
    count = [sum(r.verdict == v for r in p.answers) for v in ("passed", "failed", "not measured")]
    caught = sum(bool(c) for c in p.caught.values())
    return [p.stage.id, p.stage.title, *map(str, (len(p.answers), *count, len(p.caught), caught)), f"{p.seconds:.1f}"]


def _checks(p: Proof) -> list[str]:
    """A line for each check, and one for each further number of it."""
    rows: list[list[str]] = []
    for r in p.answers:
        main = headline(r) if r.measures else None
        catches = sum(r.name in caught for caught in p.caught.values())
        reason = f": {r.reason}" if r.verdict != "passed" and r.reason else ""
        rows.append([r.claim, f"`{r.name}`", r.verdict + reason, *_number(main), f"{r.seconds:.2f}", str(catches)])
        rows += [
            [f"&nbsp;&nbsp;{m.name}", "", "", *_number(m), "", ""] for m in r.measures if m is not main and m.name != r.claim
        ]
    return _table(["check", "name", "verdict", "measured", "gate", "compared with", "s", "faults caught"], rows)


def _number(m: Measure | None) -> list[str]:
    if m is None:
        return ["", "", ""]
    baseline = "" if m.baseline is None else figure(m.baseline, m.unit, m.gate) + (f" of {m.against}" if m.against else "")
    return [figure(m.value, m.unit, m.gate), gate_of(m.gate, m.unit), baseline]


def _fault(name: str, caught: list[str]) -> list[str]:
    return [name, str(len(caught)), ", ".join(f"`{c}`" for c in caught) or "none"]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table that reads as one in a terminal, too: columns as wide as their widest cell, but for the last."""
    every = [[_cell(c) for c in row] for row in (head, *rows)]
    wide = [max(3, *(len(row[n]) for row in every)) for n in range(len(head) - 1)] + [len(head[-1])]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, wide, strict=True)) + " |" for row in every]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in wide) + "|", *lines[1:]]
