"""`./vc ledger`: one workload through every stage, and what each of them gained.

    ./vc ledger                  the table, in a minute or two; the figures are kept for the guides
    ./vc ledger --svg FILE       a drawing as well
    ./vc ledger --reference      with none of your files
    ./vc ledger --quick          a small model and a small workload, in seconds; nothing is kept

Figures: tokens a second; the factor over the row before; forward passes; bytes read for a token (all weights once a pass, and
the keys and values that attention looks at); rows that get a token in a step; the longest wait from one token to the next.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from course.runner.arguments import Parser
from course.runner.declaration import ROOT, ladder
from course.runner.ledger_picture import shown, svg
from course.runner.ledger_values import own_path
from course.runner.problems import Problem
from course.runner.terminal import Screen, warn

COLUMNS = (("tokens/s", 10), ("factor", 8), ("passes", 8), ("MB a token", 12), ("rows", 6), ("worst gap", 10))
NAME = 22


def banked_files() -> dict[str, Path]:
    """The learner's file of every banked stage, by id; none where progress cannot be read."""
    try:
        from course.runner.progress import load

        progress = load()
        found = [s for s in ladder()[1] if progress.banked(s, "torch")]
        return {s.id: s.file("torch") for s in found if s.file("torch").is_file()}
    except Exception as error:
        warn(f"your banked files cannot be listed ({error}): the reference runs")
        return {}


def parser() -> Parser:
    made = Parser("ledger", "One workload through every stage: what each of them gains, with your own banked files.")
    made.add_argument("--json", action="store_true", help="the figures as JSON, in place of the table")
    made.add_argument("--svg", type=Path, metavar="FILE", help="a drawing as well")
    made.add_argument("--write", action="store_true", help="also into benchmarks/results, as what this machine class does")
    made.add_argument("--reference", action="store_true", help="with none of your own files")
    made.add_argument("--quick", action="store_true", help="a small model and workload, in seconds; nothing is kept")
    made.add_argument("--threads", type=int, help="of the CPU; default: all. With 1, times are CPU time, not wall time")
    return made


def main(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    if given.threads is not None and given.threads < 1:
        raise Problem(f"--threads must be at least 1, got {given.threads}")
    if given.threads is not None and given.threads > (most := os.cpu_count() or 1):
        raise Problem(f"--threads {given.threads}: this machine has {most} cores")
    if given.svg and not given.svg.absolute().parent.is_dir():
        raise Problem(f"--svg {given.svg}: there is no folder {given.svg.absolute().parent}")
    screen = Screen()
    threads = given.threads or (1 if given.quick else None)  # the small model is too small to share out
    if threads != 1:
        warn_of_neighbours()
    found = document({} if given.reference else banked_files(), given.quick, threads, None if given.json else screen)
    if given.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        notes(found, screen)
    if given.svg:
        put(given.svg, svg(found))
    if not given.quick:
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        put(own_path(), text)
        if given.write:
            from cutaway.bench.report import host_class

            put(ROOT / "benchmarks" / "results" / f"ledger-{host_class()}.json", text)
    return 0


def warn_of_neighbours() -> None:
    """Threads that wait for each other on a busy machine make times that mean nothing."""
    from cutaway.core.machine import cores

    load = os.getloadavg()[0]
    if load > 0.8 * cores():
        warn(f"the machine is busy (load {load:.1f} on {cores()} cores): let it rest, or --threads 1, whose times are CPU time")


def document(
    theirs: dict[str, Path], quick: bool = False, threads: int | None = None, screen: Screen | None = None
) -> dict[str, Any]:
    """Measures. The rows are shown as they come where there is a screen."""
    import torch

    from course.given.torch_model import REAL, load
    from course.runner import ledger_rows
    from course.runner.ledger_workload import of_random_ids, of_text
    from cutaway.bench.report import commit, cpu_model, host_class
    from cutaway.core.errors import CutawayError
    from cutaway.core.machine import cores

    torch.set_num_threads(threads or cores())
    try:
        model = ledger_rows.Watched(load("ladder" if quick else "real").decoder)
    except CutawayError as error:
        raise Problem(str(error)) from None
    work = of_random_ids(model.vocabulary) if quick else of_text()
    used = torch.get_num_threads()
    if used == 1:
        model.now = time.process_time
    name = "ladder" if quick else REAL
    if screen:
        dtype = str(model.dtype).removeprefix("torch.")
        head(screen, f"{name}, {dtype}, CPU, {threads_of(used)}", work.told)
    rows: list[dict[str, Any]] = []
    for row in ledger_rows.ROWS:
        rows.append(ledger_rows.measure(row, model, work, theirs, 1 if quick else row.rounds))
        ledger_rows.compare(rows)
        if screen:
            line(rows[-1], screen, first=len(rows) == 1)
    for each in rows:
        del each["answers"]
    return {
        "machine": f"{cpu_model().partition(' (family')[0]}, {cores()} cores", "host_class": host_class(),
        "command": " ".join(["vc ledger", *(["--quick"] if quick else []), *([f"--threads {threads}"] if threads else [])]),
        "date": time.strftime("%Y-%m-%d"), "commit": commit(), "model": name, "threads": used,
        "clock": "CPU" if used == 1 else "wall", "workload": work.told, "load_average": [round(x, 2) for x in os.getloadavg()],
        "product": rows[-1]["tokens_per_second"] / rows[0]["tokens_per_second"], "rows": rows,
    }  # fmt: skip


def threads_of(count: int) -> str:
    return f"{count} threads" if count > 1 else "CPU time of 1 thread"


def head(screen: Screen, right: str, workload: str) -> None:
    screen.ends(screen.bold("The ledger"), screen.dim(right))
    screen.say()
    screen.paragraph(workload[:1].upper() + workload[1:] + ".", style="dim")
    screen.say()
    screen.say(screen.dim(" " * (NAME + 2) + "".join(screen.pad(name, width, right=True) for name, width in COLUMNS)))


def line(row: dict[str, Any], screen: Screen, first: bool) -> None:
    name = f"{row['stage']:2}  {row['name']}"
    cells = (
        shown(row["tokens_per_second"]), "" if first else shown(row["factor"], "x"), f"{row['passes']:,}",
        shown(row["bytes_per_token"] / 1e6), shown(row["rows_mean"]), f"{row['worst_gap_ms']:,.0f} ms",
    )  # fmt: skip
    padded = [screen.pad(cell, width, right=True) for cell, (_, width) in zip(cells, COLUMNS, strict=True)]
    screen.say(screen.pad(name, NAME + 2) + screen.bold(padded[0]) + "".join(padded[1:]))
    sys.stdout.flush()  # into a pipe as well: the next row may take half a minute


def notes(found: dict[str, Any], screen: Screen) -> None:
    """What the table does not say by itself."""
    rows = {row["id"]: row for row in found["rows"]}
    screen.say()
    screen.say(screen.pad("    in all", NAME + 12) + screen.bold(screen.pad(shown(found["product"], "x"), 8, right=True)))
    screen.say()
    if found["model"] == "ladder":
        screen.paragraph("The small model lies in the processor's cache, so these factors are none to learn from.")
    before, after = rows["prefix"], rows["chunked"]
    if after["factor"] < 1.05:
        told = f"Chunked prefill is not there for throughput ({shown(after['factor'], 'x')}). Its column is the worst gap: "
        screen.paragraph(f"{told}{before['worst_gap_ms']:,.0f} ms before it, {after['worst_gap_ms']:,.0f} ms with it.")
    held = rows["continuous"], rows["paged"]
    told = [f"{r['slots_held']:,} KV slots held and {r['slots_written']:,} written with {r['name']}" for r in held]
    screen.paragraph(f"On average {told[0]}, {told[1]}.")
    if differ := max(r["differ"] for r in found["rows"]):
        near = "in bf16 another shape of batch can take the other of two close logits, and what follows it is then another text"
        screen.paragraph(f"Up to {differ} ids differ from the first row's: {near}.")
    own = sorted({id for r in found["rows"] for id in r["yours"]})
    screen.paragraph(
        f"Yours: {', '.join(own)}. The rest is the reference." if own else "None of your files ran: all is the reference."
    )
    for row in found["rows"]:
        if "error" in row:
            screen.paragraph(f"{row['name']}: your file raised, so the reference ran. {row['error']}")


def put(path: Path, text: str) -> None:
    """Written whole or not at all."""
    beside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except OSError as error:
        if beside:
            Path(beside).unlink(missing_ok=True)
        raise Problem(f"{path} cannot be written: {error.strerror}") from None
