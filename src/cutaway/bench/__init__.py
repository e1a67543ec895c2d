"""The `bench` verbs: what is claimed of this engine, measured by one command each.

Every verb prints a short table last and writes its samples, with versions, commit and machine, to
`benchmarks/results/<verb>-<host class>.json` (`--json` names another file). All talk to 127.0.0.1 alone and are bounded in
time. `--quick` makes a round short enough to see that a verb works; its figures mean nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the engine on this machine.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Option(help="Path of a folder or .gguf file, a built-in name or a hub id.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result here.", dir_okay=False)]
Quick = Annotated[bool, typer.Option(help="One short round, to see that it works; the figures mean nothing.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds after the warm-up; medians are taken over them.")]

Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the math. Default: one a core.")]

BUILT_IN = "smollm2-135m-instruct"


@app.command("cpu")
def bench_cpu(
    model: Model = BUILT_IN,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32, for both engines.")] = "bf16",
    rounds: Rounds = 5,
    peer: Annotated[bool, typer.Option(help="Run transformers beside it, in a venv of its own.")] = False,
    peer_venv: Annotated[
        Path | None, typer.Option(help="That venv; made if missing. Default: $CUTAWAY_HOME/peers/transformers.")
    ] = None,
    threads: Threads = None,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """Prefill of 512, decode at 1, 8 and 16 rows, 16 clients over HTTP; beside transformers and the machine's ceilings."""
    from cutaway.bench.cpu import Settings, run

    settings = Settings(model=model, dtype=dtype, rounds=rounds, peer=peer, peer_venv=peer_venv, threads=threads, quick=quick)
    run(settings, json)


@app.command("invariance")
def bench_invariance(model: Model = BUILT_IN, threads: Threads = None, json: Json = None, quick: Quick = False) -> None:
    """Greedy ids over depth, chunk size, prefix cache, preemption and neighbours. Exit 1 if any differs but at a near-tie."""
    from cutaway.bench.invariance import run

    run(model, json, quick=quick, threads=threads)


@app.command("front")
def bench_front(model: Model = BUILT_IN, rounds: Rounds = 5, json: Json = None, quick: Quick = False) -> None:
    """The front's CPU time a token, with a fake backend behind the real server and 16 streams. Gate: 1 ms."""
    from cutaway.bench.front import run

    run(model, rounds, json, quick=quick)


@app.command("start")
def bench_start(model: Model = BUILT_IN, rounds: Rounds = 5, json: Json = None, quick: Quick = False) -> None:
    """Time from the start of `serve` to ready and to the first token, files cold and warm. Gate: 8 s."""
    from cutaway.bench.start import run

    run(model, rounds, json, quick=quick)


@app.command("memory")
def bench_memory(
    model: Model = BUILT_IN,
    kv_blocks: Annotated[int, typer.Option(min=2, help="Blocks of 16 tokens; the load touches them all.")] = 640,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """Memory of front and engine under a load that touches every block. Gate: 800 MB of PSS."""
    from cutaway.bench.memory import run

    run(model, kv_blocks, json, quick=quick)
