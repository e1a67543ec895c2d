"""`./vc math`: why decode waits for memory, worked out for this machine beside the book's A100.

A step of decode reads every weight once and does two operations (a multiply and an add) with it for each row. Time to read
does not grow with the batch, time to compute does: where they meet, another request stops being almost free. What the machine
reads and computes a second is measured on it and kept, or typed in; then nothing but the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.runner.arguments import Parser
from course.runner.environment import ensure, has_gpu, processor
from course.runner.problems import Problem
from course.runner.terminal import Screen, ago

A100 = (2039e9, 312e12)  # bytes a second, operations a second: the card of the book, 80 GB
MODEL, PARAMETERS = "SmolLM2-135M-Instruct", 134_515_008  # the built-in model; its embedding is its head, so all are read
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "q8_0": 34 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32}
PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
LABEL, HERE, BOOK = 44, 14, 18  # columns

# ---- the machine ---------------------------------------------------------------------------------------------------------


def cache_path() -> Path:
    return Path(os.environ.get("CUTAWAY_HOME") or Path.home() / ".cache" / "cutaway") / "machine.json"


def device() -> str:
    """What is measured: the card, or the processor with the cores that this process may use."""
    if has_gpu():
        for told in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
            if found := re.search(r"^Model:\s*(.+)$", told.read_text(), re.MULTILINE):
                return found[1].strip()
        return "GPU"
    name, cores = processor()
    return f"{name}, {cores} cores"


def _kept() -> dict[str, Any]:
    """All that was measured, by machine; a file that is damaged was not."""
    try:
        told = json.loads(cache_path().read_text(encoding="utf-8"))
        return {name: entry for name, entry in told.items() if _whole(entry)}
    except (OSError, ValueError, AttributeError):
        return {}


def _whole(entry: Any) -> bool:
    try:
        figures = [entry["bandwidth"], entry["rates"]["bf16"], entry["rates"]["fp32"], entry["when"]]
        return all(isinstance(f, int | float) and math.isfinite(f) and f > 0 for f in figures)
    except (KeyError, TypeError):
        return False


def kept() -> dict[str, Any] | None:
    """What was measured on this machine, or None: {bandwidth, rates: {bf16, fp32}, when, how}."""
    return _kept().get(f"{platform.node()}: {device()}")


def measured() -> dict[str, Any]:
    """Measures this machine now and keeps it; needs torch or NumPy."""
    try:
        import torch
    except ImportError:
        found = _by_numpy()
    else:
        found = _by_card(torch) if has_gpu() and torch.cuda.is_available() else _by_torch(torch)
    entry = found | {"when": time.time()}
    path = cache_path()
    with suppress(OSError):  # a home that cannot be written to: measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(_kept() | {f"{platform.node()}: {device()}": entry}, indent=1), encoding="utf-8")
        os.replace(beside, path)
    return entry


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of some runs, after one that warms up."""
    times: list[float] = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _by_torch(torch: Any) -> dict[str, Any]:
    size, side = 512 << 20, 1536
    data = torch.ones(size // 4)
    rates: dict[str, float] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.ones(side, side, dtype=dtype) for _ in range(2))
        rates[name] = 2 * side**3 / best(lambda a=a, b=b: a @ b, 3)
    return {"bandwidth": size / best(data.sum), "rates": rates, "how": f"torch, {torch.get_num_threads()} threads"}


def _by_card(torch: Any) -> dict[str, Any]:
    size, side = 2 << 30, 8192
    half = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16

    def seconds(work: Callable[[], object], times: int = 10) -> float:
        def run() -> None:
            for _ in range(times):
                work()
            torch.cuda.synchronize()

        return best(run, 3) / times

    data = torch.ones(size // 4, device="cuda")
    rates: dict[str, float] = {}
    for name, dtype, n in (("bf16", half, side), ("fp32", torch.float32, side // 2)):
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        rates[name] = 2 * n**3 / seconds(lambda a=a, b=b: a @ b)
    return {"bandwidth": size / seconds(data.sum), "rates": rates, "how": f"torch, {torch.cuda.get_device_name()}"}


def _by_numpy() -> dict[str, Any]:
    import numpy as np

    size, side = 512 << 20, 1536
    data, a, b = np.ones(size // 4, np.float32), *(np.ones((side, side), np.float32) for _ in range(2))
    rate = 2 * side**3 / best(lambda: a @ b, 3)
    return {"bandwidth": size / best(data.sum), "rates": {"bf16": rate, "fp32": rate}, "how": "NumPy, fp32"}


def machine(dtype: str = "bf16", again: bool = False) -> tuple[float, float]:
    """(bytes read a second, operations a second) of this machine: kept, or measured now. dtype: bf16 or fp32."""
    entry = None if again else kept()
    entry = entry or measured()
    return entry["bandwidth"], entry["rates"]["fp32" if dtype == "fp32" else "bf16"]


# ---- what is typed -------------------------------------------------------------------------------------------------------


def _value(text: str) -> float:
    """A plain positive number; ValueError for all else, infinity included."""
    value = float(text) if re.fullmatch(r"\d+(\.\d+)?|\.\d+", text) else 0.0
    if not 0 < value < 1e18:
        raise ValueError
    return value


def _size(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)\s*([KMBT])", text, re.IGNORECASE)
    try:
        value = _value(found[1]) * PREFIXES[found[2].upper()] if found else _whole_number(text)
        if value > 1e15:
            raise ValueError
        return value
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of a model: 135M, 0.6B, 7B") from None


def _whole_number(text: str) -> float:
    if not re.fullmatch(r"[1-9]\d{5,14}", text):  # 7 is more likely a 7B whose unit was forgotten
        raise ValueError
    return float(text)


def _batch(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no batch: a whole number of requests, 1 to 999999")
    return int(text)


def _width(text: str) -> float:
    try:
        if 0.1 <= (value := _value(text)) <= 8:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes a weight: 0.1 to 8, 2 for bf16")


def _rate(unit: str, example: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        found = re.fullmatch(rf"([\d.]+)\s*([KMGTP]?)({unit})", text.strip(), re.IGNORECASE)
        try:
            if found:
                return _value(found[1]) * PREFIXES[found[2].upper()]
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is no rate: {example}")

    return read


def _parser() -> Parser:
    parser = Parser("math", "The arithmetic of one decode step: on this machine, and on the book's A100.")
    parser.add_argument(
        "size", nargs="?", type=_size, help="weights of the model, such as 135M or 7B; default: the built-in one"
    )
    parser.add_argument("batch", nargs="?", type=_batch, default=1, help="requests that share the step; default 1")
    width = parser.add_mutually_exclusive_group()
    width.add_argument("--dtype", choices=BYTES, help="what a weight is kept in; default bf16")
    width.add_argument("--bytes", type=_width, metavar="N", help="or the bytes that it takes")
    parser.add_argument(
        "--bandwidth", type=_rate("B/s", "--bandwidth 400GB/s"), metavar="RATE", help="not measured, but this: 400GB/s"
    )
    parser.add_argument(
        "--rate", type=_rate(r"FLOP/?s", "--rate 80TFLOP/s"), metavar="RATE", help="the same of matmul: 80TFLOP/s"
    )
    parser.add_argument("--again", action="store_true", help="measure this machine now, whatever is kept")
    return parser


# ---- what is said --------------------------------------------------------------------------------------------------------


def digits(value: float) -> str:
    """Three digits; all before the point."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value * 1.0005)))}f}"


def told(value: float, unit: str) -> str:
    """Seconds ("s"), bytes ("B") or weights (""), in the largest unit that leaves a digit before the point."""
    if unit == "":  # never "7 B", which might be bytes
        return f"{value / 1e6:,.1f} M".replace(".0 M", " M")
    steps = {"s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")), "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))}[unit]
    size, name = next((s for s in steps if value >= s[0] * 0.9995), steps[-1])
    return f"{value / size:,.1f} {name}" if unit == "B" else f"{digits(value / size)} {name}"


def rates_told(bandwidth: float, rate: float) -> tuple[str, str]:
    return f"{digits(bandwidth / 1e9)} GB/s", f"{digits(rate / 1e9)} GFLOP/s"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of decode somewhere, in seconds."""

    read: float
    compute: float
    row: float  # of `compute`, one request's

    @classmethod
    def of(cls, weights: float, width: float, batch: int, bandwidth: float, rate: float) -> Step:
        return cls(weights * width / bandwidth, 2 * batch * weights / rate, 2 * weights / rate)


def show(
    screen: Screen, name: str, weights: float, width: float, batch: int, figures: tuple[float, float], words: list[str]
) -> None:
    """words: how the two figures came about, and the last line."""
    here, book = (Step.of(weights, width, batch, *f) for f in (figures, A100))
    ours, theirs = rates_told(*figures), rates_told(*A100)

    def row(label: str, mine: str = "", other: str = "") -> None:
        screen.say(
            screen.pad(label, LABEL) + screen.bold(screen.pad(mine, HERE, right=True)) + screen.pad(other, BOOK, right=True)
        )

    def both(work: Callable[[int], str], mine: str, other: str) -> None:
        row(f"    {work(0)}", mine)
        row(f"    {work(1)}", "", other)

    steps = (here, book)
    size, count = told(weights * width, "B"), told(weights, "")
    screen.say(screen.bold(f"One decode step of {name}, batch {batch:,}"))
    row("", "this machine", "book's A100")
    row(f"  read bandwidth, {words[0]}", ours[0], theirs[0])
    row(f"  matmul rate, {words[1]}", ours[1], theirs[1])
    screen.say()
    screen.say("  time to read the weights")
    both(lambda i: f"{size} ÷ {(ours, theirs)[i][0]}", told(here.read, "s"), told(book.read, "s"))
    screen.say("  time to do the arithmetic, 2 operations a weight and request")
    times = f"2 x {batch:,} x {count}" if batch > 1 else f"2 x {count}"
    both(lambda i: f"{times} ÷ {(ours, theirs)[i][1]}", told(here.compute, "s"), told(book.compute, "s"))
    screen.say()
    screen.say("  time to read ÷ time to do the arithmetic")
    both(
        lambda i: f"{told(steps[i].read, 's')} ÷ {told(steps[i].compute, 's')}",
        *(f"{digits(s.read / s.compute)}x" for s in steps),
    )
    screen.say()
    screen.say("  batch at which the two are equal")
    both(
        lambda i: f"{told(steps[i].read, 's')} ÷ {told(steps[i].row, 's')} a request", *(digits(s.read / s.row) for s in steps)
    )
    screen.say()
    screen.paragraph(verdict(here, batch))
    screen.paragraph("Weights alone are counted: the keys and values of long contexts are read on top.", style="dim")
    screen.paragraph(words[2], style="dim")


def verdict(here: Step, batch: int) -> str:
    equal = here.read / here.row
    waits = "memory" if here.read >= here.compute else "the arithmetic"
    first = f"At batch {batch:,} this machine waits for {waits}."
    if equal < 2:
        return f"{first} Each further request costs it about as much time again."
    most = round(equal) if equal >= 100 else math.floor(equal)  # as it was shown
    return f"{first} Up to batch {most:,} another request costs it almost nothing."


def main(arguments: list[str]) -> int:
    given = _parser().parse_args(arguments)
    typed = given.bandwidth is not None and given.rate is not None
    if given.again and typed:
        raise Problem(
            "--again measures this machine, and --bandwidth with --rate leaves nothing to measure: give the one or the other"
        )
    entry = None if given.again else kept()
    if not typed and entry is None:
        ensure("math", arguments)  # torch is needed now
        entry = measured()
    kept_in = given.dtype or "bf16"
    dtype = "fp32" if kept_in == "fp32" else "bf16"  # what it is computed in
    figures, words = [given.bandwidth, given.rate], ["typed", "typed", "Typed figures; without them this machine is measured."]
    if entry is not None and not typed:
        words[2] = f"Measured {ago(entry['when'], time.time())} by {entry['how']}; ./vc math --again measures it now."
        for i, value in enumerate((entry["bandwidth"], entry["rates"][dtype])):
            if figures[i] is None:
                figures[i], words[i] = value, "measured" if i == 0 else f"{dtype}, measured"
    weights, width = given.size or float(PARAMETERS), given.bytes or BYTES[kept_in]
    kind = f"{given.bytes:g} bytes a weight" if given.bytes else kept_in
    name = f"{MODEL if given.size is None else 'a model of ' + told(weights, '') + ' weights'}, {kind}"
    bandwidth, rate = figures
    assert bandwidth is not None and rate is not None, "a figure is typed or measured"
    show(Screen(), name, weights, width, given.batch, (bandwidth, rate), words)
    return 0
