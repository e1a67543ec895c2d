"""What the front costs a token: the real server and its second process, with a backend that computes nothing.

The front's process does the HTTP, the prefix hashes, the detokenizer, stop strings and the stream; its CPU time over a load
divided by the tokens delivered is that cost. It is CPU time, so the client and the engine beside it do not count.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import typer

from cutaway.bench import drive, http_client, report, served, workloads
from cutaway.bench.report import Figure

FAKE = "cutaway.backends.fake:create"
STREAMS, PROMPT, TOKENS = 16, 128, 256
GATE_MS = 1.0


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def run(model: str, rounds: int, json_path: Path | None, *, quick: bool) -> None:
    rounds, tokens = (1, 16) if quick else (rounds, TOKENS)
    highest = drive.highest_id(model)
    cost, rate, first = list[float](), list[float](), list[float]()
    with served.serving(["--model", model, "--backend", FAKE, "--kv-blocks", "1024"]) as server:
        typer.echo(f"{STREAMS} streams of {tokens} tokens, {rounds} rounds, fake backend behind the real server")
        for turn in range(rounds + 1):  # the first one warms up
            prompts = workloads.prompts(turn, STREAMS, PROMPT, highest)
            before = cpu_seconds(server.front)
            wall, answers = http_client.load(server.port, server.model, prompts, tokens)
            spent = cpu_seconds(server.front) - before
            delivered = sum(a.tokens for a in answers)
            if turn or quick:
                cost.append(1000 * spent / delivered)
                rate.append(delivered / wall)
                first.append(1000 * max(a.ttft for a in answers))
    figures = [
        Figure("front, CPU time a token", "ms", cost, "lower", GATE_MS, "user + system of the front's process"),
        Figure("tokens delivered", "tokens/s", rate, note=f"{STREAMS} streams; client, front and engine on the same cores"),
        Figure("slowest first token", "ms", first, "lower"),
    ]
    facts = {"streams": STREAMS, "prompt_tokens": PROMPT, "output_tokens": tokens, "backend": FAKE}
    report.finish("front", figures, json_path=json_path, quick=quick, facts=facts)
