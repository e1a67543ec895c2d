"""What this machine lets the process use."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores that this process may run on; all of them where the system does not say (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
