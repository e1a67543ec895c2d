"""`serve` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

SCRIPT = """
import json, sys
from cutaway.core.errors import CutawayError
from cutaway.engine.config import EngineConfig
from cutaway.server.serve import serve
config, options = map(json.loads, sys.argv[1:])
try:
    serve(EngineConfig(**config), port=0, **options)
except CutawayError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
"""
LIMIT = 180  # seconds that any of these processes may live


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


@contextmanager
def serve_process(config: Mapping[str, Any], variables: Mapping[str, str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    server = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(config), json.dumps(options)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(variables),
    )  # fmt: skip
    timer = threading.Timer(LIMIT, server.kill)
    timer.start()
    try:
        yield server
    finally:
        timer.cancel()
        server.kill()
        server.communicate()


def banner_of(server: subprocess.Popen[str]) -> list[str]:
    assert server.stdout is not None
    assert server.stderr is not None
    lines = [server.stdout.readline()]
    while not lines[-1].startswith("Ready"):
        assert lines[-1], (lines, server.stderr.read())
        lines.append(server.stdout.readline())
    return lines


def url_of(server: subprocess.Popen[str]) -> str:
    return next(line for line in banner_of(server) if line.split()[:1] == ["Page"]).split()[1].rstrip("/")
