"""The table stage x checks x numbers x verdicts, and of which fault is caught by which check: as JSON and to be read."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course.runner.checking import Result
from course.runner.declaration import ROOT, Track
from course.runner.report import headline
from course.runner.terminal import figure, gate_of

if TYPE_CHECKING:
    from course.runner.proving import Proof


def machine(gpu: bool) -> dict[str, Any]:
    """What was measured on. name: short, for file names."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    cpu = found[1] if found else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    card = ""
    if gpu:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        card = asked.stdout.strip().partition("\n")[0]
    short = re.sub(r"\(.*?\)|processor|cpu|@.*", "", card or cpu, flags=re.IGNORECASE)
    name = re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")
    return {
        "name": name if card else f"{name}-{cores}c",
        "cpu": cpu,
        "cores": cores,
        "gpu": card,
        "system": f"{platform.system()} {platform.release()}",
    }


def told(result: Result) -> dict[str, Any]:
    measures = [
        {"name": m.name, "value": m.value, "unit": m.unit, "gate": m.gate, "baseline": m.baseline} for m in result.measures
    ]
    return {"name": result.name, "claim": result.claim, "verdict": result.verdict, "reason": result.reason,
            "seconds": round(result.seconds, 3), "measures": measures}  # fmt: skip


def write(proofs: list[Proof], track: Track, gpu: bool) -> list[Path]:
    """Writes both files; answers their paths."""
    here = machine(gpu)
    stages = [{"stage": p.stage.id, "title": p.stage.title, "seconds": round(p.seconds, 1),
               "checks": [told(r) for r in p.answers],
               "faults": p.caught, "complaints": p.complaints} for p in proofs]  # fmt: skip
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = ROOT / "benchmarks" / "results" / f"ladder-{here['name']}.json"
    path.write_text(
        json.dumps({"command": "./vc verify --full", "machine": here, "date": date, "track": track, "stages": stages}, indent=1)
        + "\n"
    )
    readable = path.with_suffix(".md")
    readable.write_text("\n".join(_readable(proofs, here, date)) + "\n", encoding="utf-8")
    return [path, readable]


def _readable(proofs: list[Proof], here: dict[str, Any], date: str) -> list[str]:
    results = [r for p in proofs for r in p.answers]
    count = {v: sum(r.verdict == v for r in results) for v in ("passed", "failed", "not measured")}
    measured = sum(bool(r.measures) for r in results)
    lines = [
        "# The ladder's answers through its checks",
        "",
        f"`./vc verify --full` on {here['gpu'] or here['cpu']}, {here['cores']} cores, {date}.",
        f"{len(results)} checks: {count['passed']} passed, {count['failed']} failed, {count['not measured']} not measured;"
        f" {measured} carry a number of this run. {sum(len(p.caught) for p in proofs)} planted faults.",
    ]
    for p in proofs:
        lines += [
            "",
            f"## {p.stage.id} {p.stage.title}",
            "",
            "| check | verdict | measured | gate | s | faults caught |",
            "|---|---|---|---|---|---|",
        ]
        for r in p.answers:
            m = headline(r) if r.measures else None
            number = figure(m.value, m.unit, m.gate) if m else ""
            catches = sum(r.name in caught for caught in p.caught.values())
            reason = f" ({r.reason})" if r.verdict == "not measured" else ""
            gate = gate_of(m.gate, m.unit) if m else ""
            lines.append(f"| {r.claim} | {r.verdict}{reason} | {number} | {gate} | {r.seconds:.2f} | {catches} |")
        lines += ["", *(f"- *{fault}*: caught by {', '.join(caught) or 'none'}" for fault, caught in p.caught.items())]
    return lines
