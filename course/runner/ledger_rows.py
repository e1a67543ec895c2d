"""One workload through every stage: what each makes of it, timed and counted.

All requests are there at the start, and there is one KV memory for whatever holds keys and values. Places that are reserved
whole take a window of it each; rows in blocks take what they have written. Answers have fixed lengths, so that every row of
the ledger does the same work; ids are greedy, and those that differ from the first row's are counted: near-ties, since
numbers come out of bf16 a little differently in every batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from traceback import extract_tb
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from course.given.rig import ladder_engine, request
from course.given.torch_model import Model
from course.runner.declaration import ladder
from course.runner.faults import answer_path
from course.runner.ledger_workload import BLOCK, Workload
from course.runner.worker import load as load_file
from cutaway.core.plan import StepPlan


class Watched(Model):
    """The given model, with the time at which each pass began. now: wall time or, with one thread, also CPU time, which
    neighbours on the machine do not change."""

    now: Callable[[], float] = staticmethod(time.perf_counter)
    began: list[float]

    def embed(self, ids: Tensor) -> Tensor:
        self.began.append(self.now())
        return super().embed(ids)

    def reset(self) -> None:
        self.counts.reset()
        self.began = []


@dataclass(slots=True)
class Run:
    """What one run of the workload gave. kv_tokens: keys that attention looked at, summed over passes and rows; steps:
    points in time at which rows got an id; held, written: KV slots after each step."""

    seconds: float = 0.0
    answers: list[list[int]] = field(default_factory=list[list[int]])
    passes: int = 0
    positions: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    rows_most: int = 1
    worst_gap: float = 0.0
    held: list[int] = field(default_factory=list[int])
    written: list[int] = field(default_factory=list[int])


Runner = Callable[[Watched, Workload, dict[str, ModuleType]], Run]


def _gaps(times: Sequence[float]) -> float:
    return max((b - a for a, b in pairwise(times)), default=0.0)


def _one_by_one(model: Watched, work: Workload, generate: Callable[..., list[int]], cached: bool) -> Run:
    """Stages 01 and 02: one request after the other, a pass an id."""
    run = Run()
    for prompt, most in zip(work.prompts, work.answers, strict=True):
        model.reset()
        began = model.now()
        run.answers.append(generate(model, list(prompt), most))
        ended = model.now()
        run.seconds += ended - began
        run.worst_gap = max(run.worst_gap, _gaps([*model.began[1:], ended]))  # an id is there when the next pass begins
        tokens = [t for _, t in model.counts.shapes]
        contexts = np.cumsum(tokens).tolist() if cached else tokens
        run.passes += len(tokens)
        run.positions += model.counts.positions
        run.kv_tokens += sum(contexts)
        run.prefill_tokens += sum(min(len(prompt), t) for t in tokens if t > 1)
        if cached:
            run.held += [work.window] * len(tokens)
            run.written += contexts
    run.steps = run.passes
    return run


def naive(model: Watched, work: Workload, parts: dict[str, ModuleType]) -> Run:
    return _one_by_one(model, work, parts["01"].naive_generate, False)


def cache(model: Watched, work: Workload, parts: dict[str, ModuleType]) -> Run:
    return _one_by_one(model, work, parts["02"].cached_generate, True)


def static(model: Watched, work: Workload, parts: dict[str, ModuleType]) -> Run:
    """Stage 04: as many reserved rows as fit, in order of arrival, until the slowest of each batch has ended."""
    run = Run(rows_most=work.rows)
    for first in range(0, len(work.prompts), work.rows):
        prompts, budgets = work.prompts[first : first + work.rows], work.answers[first : first + work.rows]
        model.reset()
        began = model.now()
        run.answers += parts["04"].static_batch_generate(model, [list(p) for p in prompts], list(budgets))
        ended = model.now()
        run.seconds += ended - began
        run.worst_gap = max(run.worst_gap, _gaps([*model.began[1:], ended]))
        shapes = model.counts.shapes
        run.passes += len(shapes)
        run.positions += model.counts.positions
        run.prefill_tokens += sum(rows * t for rows, t in shapes if t > 1)
        columns = np.cumsum([t for _, t in shapes]).tolist()
        run.kv_tokens += sum(rows * c for (rows, _), c in zip(shapes, columns, strict=True))
        run.held += [work.rows * work.window] * len(shapes)
        run.written += [sum(len(p) + min(n, g) for p, g in zip(prompts, budgets, strict=True)) for n in range(len(shapes))]
    run.steps = run.passes
    return run


def continuous(model: Watched, work: Workload, parts: dict[str, ModuleType]) -> Run:
    """Stage 05: the same reserved rows, given away again in the step in which they become free."""
    run = Run(answers=[[] for _ in work.prompts])
    model.reset()
    began = model.now()
    engine = parts["05"].ContinuousEngine(model, work.rows)
    for id, (prompt, most) in enumerate(zip(work.prompts, work.answers, strict=True)):
        engine.add_request(id, list(prompt), most)
    stamps: dict[int, list[float]] = {}
    while engine.has_work:
        done = engine.step()
        now, served = model.now(), [*engine.running, *done]
        for each in served:
            stamps.setdefault(each.id, []).append(now)
            run.kv_tokens += len(work.prompts[each.id]) + len(each.output) - 1
        for each in done:
            run.answers[each.id] = list(each.output)
        run.steps += 1
        run.rows_most = max(run.rows_most, len(served))
        run.held.append(work.rows * work.window)
        run.written.append(sum(len(work.prompts[r.id]) + len(r.output) - 1 for r in served))
    run.seconds = model.now() - began
    run.worst_gap = max(map(_gaps, stamps.values()))
    run.passes, run.positions = model.counts.passes, model.counts.positions
    run.prefill_tokens = sum(rows * t for rows, t in model.counts.shapes if t > 1)
    return run


def paged(model: Watched, work: Workload, parts: dict[str, ModuleType]) -> Run:
    """Stages 06, 07 and 10 in the engine: rows of blocks, whole prompts, nothing shared."""
    return _engine(model, work, parts, prefix=False, budget=work.budget)


def prefix(model: Watched, work: Workload, parts: dict[str, ModuleType]) -> Run:
    return _engine(model, work, parts, prefix=True, budget=work.budget)


def chunked(model: Watched, work: Workload, parts: dict[str, ModuleType]) -> Run:
    return _engine(model, work, parts, prefix=True, budget=work.slices)


def _engine(model: Watched, work: Workload, parts: dict[str, ModuleType], *, prefix: bool, budget: int) -> Run:
    run = Run()
    limits = {"rows": len(work.prompts), "budget": budget, "window": work.window}
    modules: dict[str, Any] = dict(parts)
    own = modules.pop("prefix_cache", None)
    cache = own if prefix and own is not None else prefix
    engine = ladder_engine(num_blocks=work.memory // BLOCK + 1, prefix_cache=cache, limits=limits, model=model, **modules)
    backend = engine._backend  # pyright: ignore[reportPrivateUsage]  # where every pass of a step goes by
    submit = backend.submit

    def counted(plan: StepPlan) -> Any:
        run.passes += 1
        run.positions += int(plan.n_tokens.sum())
        run.kv_tokens += int((plan.start + plan.n_tokens).sum())
        return submit(plan)

    backend.submit = counted  # type: ignore[method-assign]
    asked = [
        request(id, prompt, max_tokens=most, engine=engine)
        for id, (prompt, most) in enumerate(zip(work.prompts, work.answers, strict=True))
    ]
    stamps: dict[int, list[float]] = {}
    began = model.now()
    for each in asked:
        engine.add(each)
    while engine.has_work:
        outputs = engine.step()
        now = model.now()
        for output in outputs:
            stamps.setdefault(output.id, []).append(now)
        held, written = _slots(engine.scheduler.running)
        run.held.append(held)
        run.written.append(written)
        run.steps += bool(outputs)
        run.rows_most = max(run.rows_most, len(outputs))
    run.seconds = model.now() - began
    run.worst_gap = max(map(_gaps, stamps.values()))
    run.answers = [each.tokens[each.num_prompt :] for each in asked]
    run.prefill_tokens = run.positions - sum(len(a) - 1 for a in run.answers)
    return run


def _slots(running: Sequence[Any]) -> tuple[int, int]:
    """KV slots in the tables of running requests, a shared block once, and how many of them hold a token."""
    filled: dict[int, int] = {}
    for each in running:
        for index, block in enumerate(each.table.blocks):
            filled[block] = max(filled.get(block, 0), min(BLOCK, max(0, each.computed - index * BLOCK)))
    return len(filled) * BLOCK, sum(filled.values())


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the ledger. stages: whose files it is about; beside: those that it runs with; parts name them to the engine."""

    id: str
    name: str
    run: Runner
    stages: tuple[str, ...]
    beside: tuple[str, ...] = ()
    rounds: int = 2

    @property
    def stage(self) -> str:
        return self.stages[-1] if self.stages else ""


ROWS = (
    Row("naive", "no cache", naive, ("01",), rounds=1),
    Row("cache", "KV cache", cache, ("02",), rounds=1),
    Row("static", "static batching", static, ("04",)),
    Row("continuous", "continuous batching", continuous, ("05",)),
    Row("paged", "paged blocks", paged, ("06", "07"), ("10",)),
    Row("prefix", "prefix cache", prefix, ("09",), ("06", "07", "10")),
    Row("chunked", "chunked prefill", chunked, ("11",), ("06", "07", "09", "10")),
    Row("engine", "engine's attention", chunked, (), ()),
)


def modules(row: Row, theirs: dict[str, Path]) -> dict[str, ModuleType]:
    """What a row runs with: by stage for 01 to 05, by name of the engine's part for the others."""
    needed = (*row.stages, *row.beside)
    if not needed:
        return {}  # the engine with nothing but its own
    found: dict[str, ModuleType] = {}
    by_id = {s.id: s for s in ladder()[1]}
    for id in needed:
        part = by_id[id].part
        if id in theirs or not part or id == "07":
            found[part or id] = load_file(
                theirs.get(id) or answer_path(by_id[id]), f"ledger_{id}_{'yours' if id in theirs else 'reference'}"
            )
    if "06" in needed and "11" not in needed:  # before stage 11 a prompt goes in whole
        found["chunked"] = whole()
    return found


def whole() -> ModuleType:
    from cutaway.core import scheduler

    module = ModuleType("whole_or_nothing")
    module.split = scheduler.whole_or_nothing  # type: ignore[attr-defined]
    return module


def measure(row: Row, model: Watched, work: Workload, theirs: dict[str, Path], rounds: int) -> dict[str, Any]:
    """The figures of a row: medians of times, counts of the last run. Files that raise are said, and the reference runs."""
    used = {id: path for id, path in theirs.items() if id in (*row.stages, *row.beside)}
    error = ""
    try:
        runs = _runs(row, model, work, used, rounds)
    except Exception as problem:
        if not used:
            raise
        error = f"{type(problem).__name__}: {' '.join(str(problem).split())}{_place(problem, used)}"
        used = {}
        runs = _runs(row, model, work, used, rounds)
    told = figures(row, model, work, runs)
    told["source"] = "yours" if row.stages and all(id in used for id in row.stages) else "reference"
    told["yours"] = sorted(used)
    return told | ({"error": error} if error else {})


def _place(problem: BaseException, files: dict[str, Path]) -> str:
    """The deepest line of one of these files that an exception passed through, or ""."""
    theirs = {str(path): path.name for path in files.values()}
    passed = [f", {theirs[f.filename]}:{f.lineno}" for f in extract_tb(problem.__traceback__) if f.filename in theirs]
    return passed[-1] if passed else ""


def _runs(row: Row, model: Watched, work: Workload, theirs: dict[str, Path], rounds: int) -> list[Run]:
    parts = modules(row, theirs)
    row.run(model, replace(work, prompts=work.prompts[:2], answers=[2, 2]), parts)  # what only a first run pays
    runs = [row.run(model, work, parts) for _ in range(rounds)]
    lengths = [len(a) for a in runs[-1].answers]
    if lengths != work.answers:
        raise ValueError(f"answers of {lengths} tokens, asked for {work.answers}")
    return runs


def figures(row: Row, model: Model, work: Workload, runs: Sequence[Run]) -> dict[str, Any]:
    last, seconds, ids = runs[-1], median(r.seconds for r in runs), sum(work.answers)
    kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize

    def mean(values: Sequence[int]) -> int:
        return round(sum(values) / len(values)) if values else 0

    return {
        "id": row.id, "stage": row.stage, "name": row.name,
        "tokens_per_second": ids / seconds, "seconds": seconds, "passes": last.passes, "positions": last.positions,
        "bytes_per_token": round((last.passes * model.weight_bytes + last.kv_tokens * kv_bytes) / ids),
        "rows_mean": ids / last.steps, "rows_most": last.rows_most,
        "slots_held": mean(last.held), "slots_written": mean(last.written), "prefill_tokens": last.prefill_tokens,
        "worst_gap_ms": 1e3 * median(r.worst_gap for r in runs), "rounds": len(runs), "answers": last.answers,
    }  # fmt: skip


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to the newest row its factor over the one before it, and how many of its ids differ from the first row's."""
    first, before, row = rows[0], rows[max(0, len(rows) - 2)], rows[-1]
    row["factor"] = row["tokens_per_second"] / before["tokens_per_second"]
    pairs = zip(first["answers"], row["answers"], strict=True)
    row["differ"] = sum(a != b for x, y in pairs for a, b in zip(x, y, strict=True))
