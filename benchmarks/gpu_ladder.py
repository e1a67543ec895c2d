"""Every check of the ladder on a GPU, and how fast the decode kernel reads: `python benchmarks/gpu_ladder.py --out FOLDER`.

Runs the reference answers through the checks in this process, one stage after another, then times `paged_decode` as a CUDA
graph for a few shapes and ways to build it. Prints a short table last; writes `ladder.json` and `paged_decode.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

SHAPES = ((64, 640), (64, 4096), (8, 32768), (1, 4096))  # rows, context; 32 heads on 8 key heads of 128
BUILDS = ((64, 2, 4), (64, 4, 3), (64, 4, 4), (32, 4, 4), (128, 4, 3))  # keys a tile, warps, stages
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16


def run_ladder(only: list[str]) -> list[dict[str, Any]]:
    """Results of all stages that are here; a stage that breaks the process's patience is said and passed over."""
    from course.runner.declaration import ladder
    from course.runner.worker import run_stage

    results: list[dict[str, Any]] = []
    for stage in ladder()[1]:
        if not stage.is_here("torch") or (only and stage.id not in only):
            continue
        began = time.perf_counter()
        try:
            here = [asdict(result) for result in run_stage(stage, "torch", "answers")]
        except Exception:
            print(f"stage {stage.id} could not be run\n{traceback.format_exc()}", flush=True)
            continue
        results += here
        print(f"stage {stage.id}: {told(here)} in {time.perf_counter() - began:.1f} s", flush=True)
        for result in here:
            if result["verdict"] != "passed":
                print(
                    f"  {result['verdict']}: {result['name']} | {result['probably']} | {result['reason']} | {result['where']}"
                )
                print("   ", " / ".join(result["traceback"].strip().splitlines()[-3:]), flush=True)
    return results


def told(results: list[dict[str, Any]]) -> str:
    verdicts = [result["verdict"] for result in results]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in ("passed", "failed", "not measured"))


def graph_seconds(call: Callable[[], object], replays: int = 50) -> float:
    """Of one call, as the mean of the replays of a CUDA graph that holds several: no launch is waited for."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), 10
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times: list[float] = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays // 5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls / (replays // 5))
    return sorted(times)[len(times) // 2]


def decode_case(rows: int, context: int) -> tuple[Any, ...]:
    import torch

    blocks = rows * context // BLOCK
    k, v = (torch.randn(blocks, KV_HEADS, BLOCK, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    tables = torch.randperm(blocks, device="cuda").view(rows, -1).int()
    contexts = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    return torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda"), k, v, tables, contexts


def run_decode() -> list[dict[str, Any]]:
    """Times of each shape: as the engine builds the kernel, then by hand."""
    from course.given.launches import read_rate

    from cutaway.backends.torch.kernels import paged_decode as kernel

    own, card, table = kernel.choices, read_rate(), []
    for rows, context in SHAPES:
        case = decode_case(rows, context)
        nbytes = 2 * case[1].numel() * case[1].element_size()
        splits_tried = (None,) if rows * KV_HEADS >= 512 else (None, 4, 8, 16)
        for build in (None, *BUILDS):
            if build is not None:
                kernel.TILE_BYTES = build[0] * DIM * 2
                parts = dict(zip(("tile", "warps", "split_warps", "stages"), (build[0], build[1], *build[1:]), strict=True))
                kernel.choices = lambda capability, dtype, parts=parts: own(capability, dtype) | parts
            for splits in splits_tried:
                try:
                    seconds = graph_seconds(lambda s=splits, c=case: kernel.paged_decode(*c, scale=DIM**-0.5, num_splits=s))
                except Exception as error:  # a build that a card has no room for
                    print(f"{rows} x {context} {build} {splits}: {type(error).__name__}", flush=True)
                    continue
                table.append({"rows": rows, "context": context, "build": build, "splits": splits, "microseconds": 1e6 * seconds,
                              "gb_per_second": nbytes / seconds / 1e9, "share": nbytes / seconds / card})  # fmt: skip
            kernel.choices, kernel.TILE_BYTES = own, 16384
        del case
    print(f"\nthis card was measured to read {card / 1e9:,.0f} GB/s")
    return table


def print_decode(table: list[dict[str, Any]]) -> None:
    """Of each shape the engine's own build, and the three fastest."""
    print(f"{'rows x context':>16} {'tile, warps, stages':>20} {'splits':>6} {'us':>8} {'GB/s':>7} {'share':>6}")
    for rows, context in SHAPES:
        here = [line for line in table if (line["rows"], line["context"]) == (rows, context)]
        own = [line for line in here if line["build"] is None and line["splits"] is None]
        for line in own + sorted(here, key=lambda line: line["microseconds"])[:3]:
            build = ", ".join(map(str, line["build"])) if line["build"] else "own"
            print(f"{rows:>7} x {context:<6} {build:>20} {line['splits'] or 'own':>6} {line['microseconds']:>8.1f} "
                  f"{line['gb_per_second']:>7,.0f} {line['share']:>6.0%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--stages", nargs="*", default=[], help="ids such as 07; default: all")
    parser.add_argument("--part", choices=("all", "ladder", "decode"), default="all")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    results: list[dict[str, Any]] = []
    table: list[dict[str, Any]] = []
    if given.part != "ladder" and torch.cuda.is_available():
        table = run_decode()
        (given.out / "paged_decode.json").write_text(json.dumps({"card": card, "times": table}, indent=1))
    if given.part != "decode":
        results = run_ladder(given.stages)
        (given.out / "ladder.json").write_text(
            json.dumps({"card": card, "torch": torch.__version__, "checks": results}, indent=1)
        )
    print(f"\n{card}, torch {torch.__version__}")
    for stage in sorted({result["stage"] for result in results}):
        print(f"  stage {stage}: {told([result for result in results if result['stage'] == stage])}")
    for result in results:
        if result["stage"] == "08" and result["name"] in ("faster_than_stage_07", "share_of_the_read_rate"):
            print(" ", result["claim"], "|", *(f"{m['value']:.2f} {m['unit']} [{m['gate']}]" for m in result["measures"]))
    if table:
        print_decode(table)


if __name__ == "__main__":
    main()
