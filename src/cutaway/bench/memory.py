"""What front and engine hold in memory under a load that touches every block of the pool.

PSS counts a page shared by n processes as 1/n in each, so the sum over both processes is what the machine gives up for the
server; pages of the mapped model file count while they are in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import typer

from cutaway.bench import drive, http_client, report, served, workloads
from cutaway.bench.report import Figure
from cutaway.core.errors import CutawayError

GATE_MB = 800.0
ROWS, BLOCK, OUTPUT = 16, 16, 128
MB = 1e6


def rollup(pid: int) -> dict[str, int]:
    """Bytes by name (Pss, Rss, Pss_Anon, ...) of one process, from the kernel."""
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            fields[name] = int(rest.split()[0]) * 1024
    return fields


def peak_rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(slots=True)
class Sampler:
    """Reads PSS of the front and of its children every `period` seconds on a thread of its own, and keeps the peaks."""

    front: psutil.Process
    period: float = 0.25
    samples: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (front, engine) bytes
    stopped: threading.Event = field(default_factory=threading.Event)

    def read(self) -> tuple[int, int]:
        children = self.front.children(recursive=True)
        return rollup(self.front.pid)["Pss"], sum(rollup(child.pid)["Pss"] for child in children)

    def watch(self) -> None:
        while not self.stopped.wait(self.period):
            try:
                self.samples.append(self.read())
            except (OSError, psutil.NoSuchProcess):
                return


def prompt_length(kv_blocks: int, rows: int, output: int) -> int:
    """Of `rows` prompts that, with `output` tokens each, fill `kv_blocks` blocks (one of them is the dummy)."""
    return max((kv_blocks - 1) // rows * BLOCK - output, 1)


def run(model: str, kv_blocks: int, json_path: Path | None, *, quick: bool, arguments: Sequence[str] = ()) -> None:
    """`arguments`: further ones for `serve`."""
    if not Path("/proc/self/smaps_rollup").is_file():
        raise CutawayError("bench memory reads /proc/*/smaps_rollup, which this system has not got")
    rows, output, rounds = (4, 8, 1) if quick else (ROWS, OUTPUT, 3)
    kv_blocks = min(kv_blocks, 32) if quick else kv_blocks
    length, highest = prompt_length(kv_blocks, rows, output), drive.highest_id(model)
    with served.serving(["--model", model, "--kv-blocks", str(kv_blocks), *arguments]) as server:
        sampler = Sampler(server.front)
        idle = sampler.read()
        thread = threading.Thread(target=sampler.watch, daemon=True)
        thread.start()
        for turn in range(rounds):  # other prompts each time, so that blocks kept by the prefix cache are taken too
            prompts = workloads.prompts(turn, rows, length, highest)
            wall, answers = http_client.load(server.port, server.model, prompts, output)
            typer.echo(f"round {turn + 1}: {sum(a.tokens for a in answers)} tokens in {wall:.1f} s")
        sampler.stopped.set()
        thread.join()
        sampler.samples.append(sampler.read())
        peaks = [peak_rss(p.pid) for p in (server.front, *server.engines)]
    peak = max(sampler.samples, key=sum)
    figures = [
        Figure("PSS of both, peak under load", "MB", [sum(peak) / MB], "lower", GATE_MB, f"{kv_blocks} blocks, all touched"),
        Figure("PSS of the front at that time", "MB", [peak[0] / MB], "lower"),
        Figure("PSS of the engine at that time", "MB", [peak[1] / MB], "lower"),
        Figure("PSS of both, idle", "MB", [sum(idle) / MB], "lower"),
        Figure("PSS of the front, idle", "MB", [idle[0] / MB], "lower"),
        Figure("RSS of the front, peak", "MB", [peaks[0] / MB], "lower", note="VmHWM"),
        Figure("RSS of the engine, peak", "MB", [sum(peaks[1:]) / MB], "lower", note="VmHWM"),
    ]
    facts = {
        "model": model, "kv_blocks": kv_blocks, "rows": rows, "rounds": rounds, "prompt_tokens": length,
        "pss_bytes": sampler.samples,
    }  # fmt: skip
    report.finish("memory", figures, json_path=json_path, quick=quick, facts=facts)
