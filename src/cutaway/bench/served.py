"""A server of ours as a subprocess on a free port of 127.0.0.1, from its start to an orderly stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from cutaway.bench import http_client
from cutaway.core.errors import CutawayError

READY_S = 120.0
STOP_S = 15.0


@dataclass(slots=True)
class Served:
    """`front` is the process that was started; the engine is its child. `ready_s`: from exec to the first 200 of /ready."""

    port: int
    process: subprocess.Popen[bytes]
    began: float
    log: Path
    ready_s: float = 0.0
    model: str = ""

    @property
    def front(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    @property
    def engines(self) -> list[psutil.Process]:
        return self.front.children(recursive=True)

    def health(self) -> dict[str, Any]:
        _, body = http_client.get(self.port, "/health")
        return body if isinstance(body, dict) else {}


def free_port() -> int:
    with socket.socket() as s:
        s.bind((http_client.HOST, 0))
        return s.getsockname()[1]


def serve_command(port: int, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "cutaway.cli", "serve", "--host", http_client.HOST, "--port", str(port), *arguments]


def _wait(server: Served, seconds: float) -> None:
    deadline = server.began + seconds
    while time.perf_counter() < deadline:
        if server.process.poll() is not None:
            raise CutawayError(
                f"the server ended with {server.process.returncode} before it was ready: {last_line(server.log)}"
            )
        with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
            if http_client.get(server.port, "/ready")[0] == 200:
                server.ready_s = time.perf_counter() - server.began
                return
        time.sleep(0.01)
    raise CutawayError(f"the server was not ready after {seconds:.0f} s: {last_line(server.log)}")


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("cutaway: ") if lines else "it printed nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL to it and to the children it had: a benchmark leaves nothing behind."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in psutil.wait_procs(children, timeout=2)[1]:
            child.kill()
    process.wait(STOP_S)


@contextlib.contextmanager
def serving(
    arguments: Sequence[str] = (), *, environment: Mapping[str, str] | None = None, ready_s: float = READY_S
) -> Generator[Served]:
    """Starts `cutaway serve` with `arguments` and waits until it is ready; stops it at the end, whatever happens."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="cutaway-bench-") as folder:
        log = Path(folder) / "log"
        out: IO[bytes]
        with log.open("wb") as out:
            began = time.perf_counter()
            command = serve_command(port, arguments)
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
            )
        server = Served(port, process, began, log)
        try:
            _wait(server, ready_s)
            _, models = http_client.get(port, "/v1/models")
            server.model = models["data"][0]["id"]
            yield server
        finally:
            _stop(process)
