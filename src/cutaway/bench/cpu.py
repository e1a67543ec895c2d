"""Speed on this CPU: prefill of 512 tokens, decode at 1, 8 and 16 rows around 256 tokens of context, and 16 clients over HTTP.

With `--peer` transformers does the same work on the same ids in turns with ours (A B A B), both loaded beforehand, so that
what else the machine does meets both. It runs twice, with its default attention and with the one that is faster here.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import typer

from cutaway.bench import drive, http_client, peers, report, served, workloads
from cutaway.bench.ceilings import Work, dram_read, matmul
from cutaway.bench.report import Figure
from cutaway.checkpoints import resolve
from cutaway.engine.config import EngineConfig
from cutaway.engine.parts import Parts

PREFILL, CONTEXT, STEPS = 512, 256, 32
ROWS = (1, 8, 16)
CLIENTS, HTTP_IN, HTTP_OUT = 16, 128, 128
HTTP = "16 clients over HTTP"
OURS, DEFAULT, EAGER = "cutaway", "transformers, sdpa (its default)", "transformers, eager"
ATTENTION = {DEFAULT: "sdpa", EAGER: "eager"}


@dataclass(slots=True)
class Settings:
    model: str
    dtype: str
    rounds: int
    peer: bool
    peer_venv: Path | None
    threads: int | None
    quick: bool
    serve: tuple[str, ...] = ()  # further arguments for the server


@dataclass(slots=True)
class Measured:
    """Tokens a second by (what, engine), one sample a round."""

    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict[tuple[str, str], list[float]])

    def add(self, what: str, who: str, value: float) -> None:
        self.samples.setdefault((what, who), []).append(value)

    def median(self, what: str, who: str) -> float | None:
        values = self.samples.get((what, who))
        return statistics.median(values) if values else None


@dataclass(slots=True)
class Ours:
    backend: drive.Reused
    parts: Parts
    highest: int
    ids: int = 0

    def _requests(self, prompts: list[list[int]], tokens: int) -> list[drive.Request]:
        self.ids += len(prompts)
        return [drive.request(self.ids + i, p, tokens) for i, p in enumerate(prompts)]

    def prefill(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        engine, requests = drive.engine(self.backend, self.parts), self._requests([prompt], 1)
        began = time.perf_counter()
        drive.drive(engine, requests)
        return time.perf_counter() - began

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds of `steps` steps in which every row decodes. Prompts end one after the other, so the first ones are a few
        tokens ahead by then: they get as many tokens more to give."""
        ahead = 2 + sum(map(len, prompts)) // 256
        engine, requests = drive.engine(self.backend, self.parts), self._requests(prompts, ahead + steps)
        runs = drive.drive(engine, requests, until=lambda runs: all(r.ids for r in runs.values()))
        done = {id: len(r.ids) for id, r in runs.items()}
        began = time.perf_counter()
        for _ in range(steps):
            for output in engine.step():
                runs[output.id].take(output)
        seconds = time.perf_counter() - began
        given = [len(r.ids) - done[id] for id, r in runs.items()]
        assert given == [steps] * len(prompts), given
        engine.abort([r.id for r in requests])
        while engine.has_work:
            engine.step()
        return seconds


def in_process(
    ours: Ours, peer: peers.Transformers | None, seed: int, add: Callable[[str, str, float], None], steps: int
) -> None:
    prompt = workloads.prompts(seed, 1, PREFILL, ours.highest)[0]
    add("prefill 512", OURS, PREFILL / ours.prefill(prompt))
    for who, attention in ATTENTION.items() if peer else ():
        assert peer is not None
        add("prefill 512", who, PREFILL / peer.prefill(prompt, attention))
    for rows in ROWS:
        prompts = workloads.prompts(seed + rows, rows, CONTEXT - STEPS // 2, ours.highest)
        what = f"decode, {rows} row{'s' * (rows > 1)}"
        add(what, OURS, rows * steps / ours.decode(prompts, steps))
        for who, attention in ATTENTION.items() if peer else ():
            assert peer is not None
            add(what, who, rows * steps / peer.decode(prompts, steps, attention))


def over_http(server: served.Served, peer: peers.Transformers | None, seed: int, add: Callable[[str, str, float], None],
              tokens: int, highest: int) -> None:  # fmt: skip
    prompts = workloads.prompts(500 + seed, CLIENTS, HTTP_IN, highest)
    wall, answers = http_client.load(server.port, server.model, prompts, tokens)
    assert all(a.tokens == tokens for a in answers), [a.tokens for a in answers]
    add(HTTP, OURS, CLIENTS * tokens / wall)
    for who, attention in ATTENTION.items() if peer else ():
        assert peer is not None
        add(HTTP, who, CLIENTS * tokens / peer.generate(prompts, tokens, attention))


Ceilings = dict[str, list[float]]


def measure(settings: Settings, peer: peers.Transformers | None) -> tuple[Measured, Ceilings]:
    measured, ceilings = Measured(), Ceilings()
    steps, tokens = (4, 4) if settings.quick else (STEPS, HTTP_OUT)
    turns = range(0 if settings.quick else -1, 1 if settings.quick else settings.rounds)  # turn -1 warms up

    def adder(turn: int) -> Callable[[str, str, float], None]:
        return measured.add if turn >= 0 else Measured().add

    config = EngineConfig(model=settings.model, kv_blocks=640, prefix_cache=False, threads=settings.threads)
    config.dtype = "fp32" if settings.dtype == "fp32" else "bf16"
    parts, highest = Parts(), drive.highest_id(settings.model)
    ours = Ours(drive.open_backend(config, parts), parts, highest)
    for turn in turns:
        in_process(ours, peer, turn, adder(turn), steps)
        ceilings.setdefault("DRAM read", []).append(dram_read() if not settings.quick else dram_read(16 << 20))
        ceilings.setdefault("matmul", []).append(matmul(config.dtype, 256 if settings.quick else 2048))
        typer.echo(f"in process, round {turn + 1} of {settings.rounds}")
    del ours
    with served.serving(["--model", settings.model, "--dtype", config.dtype, "--kv-blocks", "640", *settings.serve]) as server:
        for turn in turns:
            over_http(server, peer, turn, adder(turn), tokens, highest)
            typer.echo(f"over HTTP, round {turn + 1} of {settings.rounds}")
    return measured, ceilings


def share(what: str, rate: float, work: Work, ceilings: Ceilings) -> str:
    """What part of the floor's speed a figure reaches; nothing for HTTP, which mixes both kinds of work."""
    read, product = statistics.median(ceilings["DRAM read"]), statistics.median(ceilings["matmul"])
    if what.startswith("prefill"):
        return f"{rate * work.prefill_floor(PREFILL, product) / PREFILL:.0%} of the matmul floor"
    if what.startswith("decode"):
        rows = int(what.split()[1])
        return f"{rate * work.decode_floor(rows, CONTEXT, read) / rows:.0%} of the DRAM floor"
    return "wall with prefill, 128 in, 128 out"


def figures_of(measured: Measured, ceilings: Ceilings, work: Work, dtype: str) -> list[Figure]:
    figures: list[Figure] = []
    for (what, who), samples in measured.samples.items():
        ours = measured.median(what, OURS)
        note = share(what, statistics.median(samples), work, ceilings)
        if who != OURS and ours is not None:
            note = f"cutaway {ours / statistics.median(samples):.2f}x; {note}"
            note += ", one static batch in process" * (what == HTTP)
        figures.append(Figure(f"{what}: {who}", "tokens/s", samples, note=note, extra={"what": what, "engine": who}))
    figures.append(Figure("ceiling: DRAM read", "GB/s", [x / 1e9 for x in ceilings["DRAM read"]]))
    figures.append(Figure(f"ceiling: {dtype} matmul", "GFLOP/s", [x / 1e9 for x in ceilings["matmul"]]))
    return figures


def run(settings: Settings, json_path: Path | None) -> None:
    with contextlib.ExitStack() as stack:
        peer = None
        if settings.peer or settings.peer_venv:
            python = peers.prepare(settings.peer_venv)
            peer = stack.enter_context(
                peers.Transformers.start(python, resolve(settings.model), settings.dtype, settings.threads)
            )
        measured, ceilings = measure(settings, peer)
    work = Work.of(settings.model, settings.dtype)
    lines = [peers.QUOTED_NOTE, report.table(peers.QUOTED, notes=False), ""]
    if peer is None:
        lines.append("transformers was not run beside it: --peer does that, in a venv of its own")
    facts = {
        "model": settings.model, "dtype": settings.dtype, "peer": peer.versions if peer else None, "context": CONTEXT,
        "decode_steps": STEPS, "quoted": [list(row) for row in peers.QUOTED], "quoted_note": peers.QUOTED_NOTE,
    }  # fmt: skip
    report.finish("cpu", figures_of(measured, ceilings, work, settings.dtype), json_path=json_path, quick=settings.quick,
                  facts=facts, lines=lines)  # fmt: skip
