"""Where programs that need more than the standard library run: `setup.sh --then` sets up what is missing, then becomes them."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NoReturn

from course.runner.declaration import ROOT

SETUP = ROOT / "setup.sh"
INSIDE = "CUTAWAY_SET_UP"  # set in the environment of what `become` started


def has_gpu() -> bool:
    """Whether a GPU of NVIDIA's is there, without loading anything."""
    return not os.environ.get("CUTAWAY_CPU") and any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def processor() -> tuple[str, int]:
    """Its name as the system tells it, and the cores that this process may use. The engine's own `cores` is not at hand before
    anything is set up."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return found[1].strip() if found else platform.processor() or platform.machine(), cores


@cache
def card() -> tuple[str, tuple[int, int] | None]:
    """Name and compute capability of the first GPU, as its driver's own program tells them; ("", None) where it is silent."""
    asked = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "", None
    name, _, capability = done.stdout.strip().partition("\n")[0].rpartition(", ")
    found = re.fullmatch(r"(\d+)\.(\d+)", capability)
    return (name, (int(found[1]), int(found[2]))) if done.returncode == 0 and found else ("", None)


def lacks(name: str, capability: tuple[int, int]) -> str:
    """What a card below sm_80 changes, and why, in a line; "" for any other."""
    if capability >= (8, 0):
        return ""
    sm = "".join(map(str, capability))
    return f"{name}, sm_{sm}: fp16 in place of bf16, no TMA, no fp8; gates compare two times on this card"


def become(*arguments: str) -> NoReturn:
    """Goes on as the environment's Python with these arguments; sets up first what is missing."""
    sys.stdout.flush()
    os.execve(SETUP, [str(SETUP), "--then", *arguments], os.environ | {INSIDE: "1"})


def ensure(verb: str, arguments: list[str]) -> None:
    """Answers inside the environment; outside of it, goes on as this verb inside."""
    if not os.environ.get(INSIDE):
        become(str(ROOT / "course" / "runner"), verb, *arguments)
