"""Where programs that need more than the standard library run: `setup.sh --then` sets up what is missing, then becomes them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from course.runner.declaration import ROOT

SETUP = ROOT / "setup.sh"
INSIDE = "CUTAWAY_SET_UP"  # set in the environment of what `become` started


def has_gpu() -> bool:
    """Whether a GPU of NVIDIA's is there, without loading anything."""
    return not os.environ.get("CUTAWAY_CPU") and any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def become(*arguments: str) -> NoReturn:
    """Goes on as the environment's Python with these arguments; sets up first what is missing."""
    sys.stdout.flush()
    os.execve(SETUP, [str(SETUP), "--then", *arguments], os.environ | {INSIDE: "1"})


def ensure(verb: str, arguments: list[str]) -> None:
    """Answers inside the environment; outside of it, goes on as this verb inside."""
    if not os.environ.get(INSIDE):
        become(str(ROOT / "course" / "runner"), verb, *arguments)
