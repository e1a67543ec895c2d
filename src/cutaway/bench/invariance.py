"""Greedy ids must not depend on how a request was computed: alone or among others, in one piece or in chunks, from the
prefix cache or not, preempted or not, with one plan in flight or two.

In float32 sums of another order still differ in their last bits, so two tokens whose logits are as good as equal may change
places. At the first difference of a prompt the margin between the two highest logits decides: under 1e-3 it is counted as a
near-tie, else it is a fault and the command ends with 1. What follows a difference is another text and is not compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import typer

from cutaway.bench import drive, report, workloads
from cutaway.bench.drive import Reused, Run
from cutaway.core.request import Request
from cutaway.engine.config import EngineConfig
from cutaway.engine.parts import Parts

NEAR_TIE = 1e-3
TOKENS, ROWS, BLOCK = 24, 16, 16
SHARED = 64  # tokens that half of the prompts begin with
LENGTHS = (5, 15, 16, 17, 64, 65, 96, 180)  # around ends of blocks, and longer than the smallest chunk


@dataclass(slots=True)
class Bench:
    """One loaded model and the prompts; `base` is each prompt alone, in one piece, without a cache."""

    backend: Reused
    parts: Parts
    tokens: int = TOKENS
    lengths: Sequence[int] = LENGTHS
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    highest: int = workloads.HIGHEST_ID
    base: list[Run] = field(default_factory=list[Run])

    def __post_init__(self) -> None:
        shared = self.draw(0, SHARED)
        for i, length in enumerate(self.lengths):
            own = self.draw(100 + i, length)
            self.prompts.append(shared + own if i % 2 else own)

    def draw(self, seed: int, count: int) -> list[int]:
        return workloads.ids(Random(seed), count, self.highest)

    def requests(self, prompts: Sequence[Sequence[int]], *, cache: bool = False, first: int = 0) -> list[Request]:
        chain = self.parts.get("prefix_cache").chain
        return [drive.request(first + i, p, self.tokens, logprobs=2, hashes=chain(p, BLOCK) if cache else ())
                for i, p in enumerate(prompts)]  # fmt: skip

    def together(self, **settings: Any) -> list[Run]:
        """All prompts at once."""
        running = drive.engine(self.backend, self.parts, **settings)
        return list(drive.drive(running, self.requests(self.prompts, cache=settings.get("cache", False))).values())

    def alone(self) -> list[Run]:
        running = drive.engine(self.backend, self.parts)
        return [drive.drive(running, self.requests([p], first=i))[i] for i, p in enumerate(self.prompts)]

    def neighbours(self) -> list[Run]:
        """Each prompt with 15 others of its own, at another place among them each time."""
        runs: list[Run] = []
        for i, prompt in enumerate(self.prompts):
            others = [self.draw(1000 * (i + 1) + k, 5 + 3 * k) for k in range(ROWS - 1)]
            others.insert(i % ROWS, prompt)
            running = drive.engine(self.backend, self.parts)
            runs.append(drive.drive(running, self.requests(others))[i % ROWS])
        return runs

    def cached(self) -> tuple[list[Run], list[Run]]:
        """With the prefix cache: the first time, and again when all prompts are known."""
        running = drive.engine(self.backend, self.parts, cache=True)
        cold = drive.drive(running, self.requests(self.prompts, cache=True))
        warm = drive.drive(running, self.requests(self.prompts, cache=True, first=len(self.prompts)))
        return list(cold.values()), list(warm.values())

    def preempted(self, *, cache: bool = False, depth: int = 0) -> tuple[list[Run], int]:
        """In a pool that all prompts fit into and their answers do not; and the preemptions."""
        blocks = sum(-(-(len(p) + 1) // BLOCK) for p in self.prompts)  # a request enters with room for one token more
        if cache:
            blocks -= (len(self.prompts) // 2 - 1) * (SHARED // BLOCK)
        whole = sum(map(len, self.prompts))  # as a budget: all are admitted in the first step
        running = drive.engine(self.backend, self.parts, blocks=blocks + 1, budget=whole, chunk=whole, cache=cache, depth=depth)
        # The longest first: the last one is preempted, and what a short one gives back does not last.
        requests = sorted(self.requests(self.prompts, cache=cache), key=lambda r: -r.num_prompt)
        runs = drive.drive(running, requests)
        return [runs[i] for i in range(len(runs))], running.stats().preemptions


@dataclass(slots=True)
class Comparison:
    name: str
    tokens: int
    differing: int
    near_ties: int
    faults: list[str]
    note: str = ""


def compare(name: str, base: Sequence[Run], runs: Sequence[Run], note: str = "") -> Comparison:
    """Where `runs` leave `base`. differing: tokens from the first difference on."""
    found = Comparison(name, sum(len(r.ids) for r in base), 0, 0, [], note)
    for i, (expected, got) in enumerate(zip(base, runs, strict=True)):
        if expected.ids == got.ids:
            continue
        at = next((k for k, (a, b) in enumerate(zip(expected.ids, got.ids, strict=False)) if a != b), None)
        if at is None:
            found.faults.append(f"{name}: prompt {i} gave {len(got.ids)} tokens, not {len(expected.ids)}")
            continue
        found.differing += len(expected.ids) - at
        if expected.margins[at] < NEAR_TIE:
            found.near_ties += 1
        else:
            found.faults.append(f"{name}: prompt {i} differs at token {at}: {got.ids[at]}, not {expected.ids[at]} "
                                f"(margin {expected.margins[at]:.4f})")  # fmt: skip
    return found


def variants(bench: Bench, quick: bool) -> list[Comparison]:
    bench.base = bench.alone()
    found: list[Comparison] = []

    def add(name: str, runs: Sequence[Run], note: str = "") -> None:
        found.append(compare(name, bench.base, runs, note))
        typer.echo(f"{name}: {found[-1].differing} of {found[-1].tokens} tokens differ")

    add("all at once", bench.together())
    add("depth 1", bench.together(depth=1))
    for chunk in (16,) if quick else (16, 64):
        add(f"chunks of {chunk}", bench.together(chunk=chunk))
        add(f"step budget {chunk}", bench.together(budget=chunk, chunk=chunk))
    cold, warm = bench.cached()
    add("prefix cache, cold", cold, f"{sum(r.num_cached for r in cold)} prompt tokens from the cache")
    add("prefix cache, warm", warm, f"{sum(r.num_cached for r in warm)} prompt tokens from the cache")
    for name, cache, depth in (("preempted", False, 0), ("preempted, cache", True, 0), ("preempted, depth 1", False, 1)):
        runs, preemptions = bench.preempted(cache=cache, depth=depth)
        add(name, runs, f"preempted {preemptions} times")
        if not preemptions:
            found[-1].faults.append(f"{name}: the pool was not tight enough to preempt anything")
    if not quick:
        add("15 neighbours", bench.neighbours())
    return found


def run(model: str, json_path: Path | None, *, quick: bool, threads: int | None = None) -> None:
    config = EngineConfig(model=model, dtype="fp32", kv_blocks=512, max_num_seqs=ROWS, threads=threads)
    parts, began = Parts(), time.perf_counter()
    bench = Bench(
        drive.open_backend(config, parts),
        parts,
        tokens=8 if quick else TOKENS,
        lengths=LENGTHS[:4] if quick else LENGTHS,
        highest=drive.highest_id(model),
    )
    found = variants(bench, quick)
    faults = [line for c in found for line in c.faults]
    rows = [["variant", "tokens", "differing", "near-ties", "note"]]
    rows += [[c.name, str(c.tokens), str(c.differing), str(c.near_ties), c.note] for c in found]
    smallest = min(m for r in bench.base for m in r.margins)
    summary = (
        f"float32, {len(bench.prompts)} prompts of {min(map(len, bench.prompts))} to {max(map(len, bench.prompts))} tokens, "
    )
    summary += f"{bench.tokens} greedy tokens each, smallest margin {smallest:.4f}, {time.perf_counter() - began:.0f} s"
    verdict = "FAILED: ids differ where no near-tie excuses it" if faults else "greedy ids are equal but for near-ties"
    facts = {"model": model, "variants": [{k: getattr(c, k) for k in c.__slots__} for c in found], "smallest_margin": smallest}
    report.finish("invariance", [], json_path=json_path, quick=quick, facts=facts, failed=bool(faults),
                  lines=[summary, *faults, report.table(rows), verdict])  # fmt: skip
