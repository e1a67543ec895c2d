"""What the front costs a token: the real server and its second process, with a backend that computes nothing.

The front's process does the HTTP, the prefix hashes, the detokenizer, stop strings and the stream; its CPU time over a load
divided by the tokens delivered is that cost. It is CPU time, so the client and the engine beside it do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import psutil
import typer

from cutaway.bench import drive, http_client, report, served, workloads
from cutaway.bench.report import Figure

FAKE = "cutaway.backends.fake:create"
STREAMS, PROMPT, TOKENS = 16, 128, 256
GATE_MS = 1.0
STEP_S = 0.01  # without a pace the steps outrun the front, tokens arrive in heaps, and a heap costs what one token does


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@dataclass(slots=True)
class Load:
    """Samples of one server, a round each."""

    cost: list[float] = field(default_factory=list[float])  # ms of CPU a token
    rate: list[float] = field(default_factory=list[float])  # tokens/s
    merged: list[float] = field(default_factory=list[float])  # tokens an event


def load(model: str, rounds: int, tokens: int, step_seconds: float) -> Load:
    """`rounds` loads after one that warms up, on a backend whose steps take `step_seconds`."""
    found, highest = Load(), drive.highest_id(model)
    arguments = ["--model", model, "--backend", FAKE, "--kv-blocks", "1024"]
    with served.serving(arguments, environment={"CUTAWAY_FAKE_SECONDS": str(step_seconds)}) as server:
        for turn in range(rounds + 1):
            prompts = workloads.prompts(turn, STREAMS, PROMPT, highest)
            before = cpu_seconds(server.front)
            wall, answers = http_client.load(server.port, server.model, prompts, tokens)
            spent = cpu_seconds(server.front) - before
            delivered = sum(a.tokens for a in answers)
            if turn:
                found.cost.append(1000 * spent / delivered)
                found.rate.append(delivered / wall)
                found.merged.append(delivered / sum(len(a.times) for a in answers))
    return found


def run(model: str, rounds: int, json_path: Path | None, *, quick: bool) -> None:
    rounds, tokens = (1, 16) if quick else (rounds, TOKENS)
    typer.echo(f"{STREAMS} streams of {tokens} tokens, {rounds} rounds, fake backend behind the real server")
    paced, free = load(model, rounds, tokens, STEP_S), load(model, rounds, tokens, 0.0)
    figures = [
        Figure("front, CPU time a token", "ms", paced.cost, "lower", GATE_MS, f"steps of {1000 * STEP_S:.0f} ms"),
        Figure("tokens an event of the stream", "", paced.merged, "lower", note="at that pace"),
        Figure("tokens delivered, unpaced", "tokens/s", free.rate, note="client, front and engine on the same cores"),
        Figure("tokens an event, unpaced", "", free.merged, "lower", note="a front that lags merges what has arrived"),
    ]
    facts = {"streams": STREAMS, "prompt_tokens": PROMPT, "output_tokens": tokens, "backend": FAKE, "step_seconds": STEP_S}
    report.finish("front", figures, json_path=json_path, quick=quick, facts=facts)
