"""The life of the server process: port, engine, banner, signals, drain, exit.

The port is bound before the model loads, so a port in use is one line at once; it accepts when the engine is ready, so
whoever can connect can ask. SIGTERM or SIGINT: no new connections, running answers get DRAIN seconds, what still runs
then ends with an error event, the engine process stops, exit code 0. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from cutaway.core.errors import CutawayError
from cutaway.engine.channel import ProcessChannel
from cutaway.engine.config import EngineConfig
from cutaway.engine.front import Front
from cutaway.engine.parts import Parts
from cutaway.server.errors import log_to_stderr
from cutaway.server.service import GuardedMetrics, Metered, Service

DRAIN = 5.0  # seconds that running answers get after a signal
T = TypeVar("T")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not accept yet. Raises CutawayError that says what to do."""
    if not 0 <= port <= 65535:
        raise CutawayError(f"--port must be 0 to 65535, where 0 takes a free one, got {port}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, ValueError) as error:
        raise CutawayError(f"--host {host!r} is no address of this machine ({error}); try 127.0.0.1") from None
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _no_port(host, port, error) from None
    return sock


def _no_port(host: str, port: int, error: Exception) -> CutawayError:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return CutawayError(f"port {port} on {host} is in use: end the program that has it, or choose another with --port")
    if code == errno.EACCES:
        return CutawayError(f"port {port} needs rights that this user has not: choose one over 1023 with --port")
    if code == errno.EADDRNOTAVAIL:
        return CutawayError(f"--host {host} is no address of this machine; try 127.0.0.1")
    return CutawayError(f"cannot listen at {host}, port {port}: {error}; choose others with --host and --port")


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def is_loopback(sock: socket.socket) -> bool:
    host = str(sock.getsockname()[0])
    return host.startswith("127.") or host == "::1"


class Signals:
    """SIGTERM and SIGINT: the first asks to stop, the second ends the process at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: int) -> None:
        if self.stop.is_set():
            os._exit(128 + number)  # the engine process sees its input close, and ends by itself
        self.stop.set()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if a signal came first, `work` being cancelled."""
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return None if task.cancelled() else task.result()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # Signals has them


def _of(own: int | None, window: int) -> str:
    return f" of {own:,}, as many as the KV blocks hold" if own is not None and own > window else ""


DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}  # torch's names, and those of --dtype


def _model(name: str, backend: dict[str, Any]) -> str:
    """What computes: the weights as they are in memory, whatever the file had, and where."""
    weights = str(backend.get("quantization") or backend.get("dtype") or "")
    facts = [DTYPES.get(weights, weights)] if weights else []
    if backend.get("weight_bytes"):
        facts.append(f"{backend['weight_bytes'] / 1e6:,.1f} MB")
    where = f"{backend['backend']} on {backend.get('device', 'CPU')}" if "backend" in backend else ""
    threads = f", {backend['threads']} threads" if where and "threads" in backend else ""
    return "   ".join(field for field in ("Cutaway", name, ", ".join(facts), where + threads) if field)


def played(report: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Whose files play, by the names that people gave them, with their stages."""
    own = [f"{Path(part['source']).name} ({part['stage']})" for part in report.values() if not part["reference"]]
    beside = [f"{Path(p['shadow']['source']).name} ({p['stage']})" for p in report.values() if "shadow" in p]
    others = sum(part["reference"] for part in report.values())
    rows = [("Yours", "  ".join(own)), ("Beside", "  ".join(beside))]
    rows += [("Dropped", f"{name}: {part['dropped']}") for name, part in report.items() if "dropped" in part]
    return [*rows, ("Reference", f"{others} other parts" if own else f"all {others} parts")]


def banner(service: Service, url: str, seconds: float) -> str:
    """What is printed when the server is ready. Its last line begins with Ready."""
    from cutaway.server.status import parts_report  # loaded beside the engine, as the app is

    info: dict[str, Any] = service.channel.ready
    backend: dict[str, Any] = info.get("backend") or {}
    blocks, size = info["kv_blocks"], info["block_size"]
    pool = f"{blocks:,} blocks of {size} tokens, {info.get('kv_bytes', 0) / 2**20:,.1f} MiB"
    rows = [
        ("KV pool", f"{pool}, room for {(blocks - 1) * size:,} tokens"),
        ("Window", f"{info['window']:,} tokens{_of(backend.get('window'), info['window'])}"),
        ("A step", f"at most {info['rows']:,} requests and {info['budget']:,} tokens"),
        ("Preemption", "swap: blocks are kept on the host" if info.get("preemption") == "swap" else ""),
        *played(parts_report(service)),
        ("", " "),
        ("API", f"{url}/v1" + (" (with the API key)" if service.api_key else "")),
        ("Page", f"{url}/"),
    ]
    lines = [f"  {name:<11} {value}".rstrip() for name, value in rows if value]
    ready = f"Ready in {seconds:.1f} s. Ctrl-C finishes what is running, twice stops at once."
    return "\n".join([_model(service.front.model_name, backend), "", *lines, "", ready])


def _load_app() -> Callable[[Service], ASGIApp]:
    """FastAPI takes a third of a second to import: time that the engine process has already begun to use."""
    from cutaway.server.app import create_app

    return create_app


async def _open(config: EngineConfig, api_key: str | None) -> tuple[Service, ASGIApp]:
    """The front and the engine, loaded side by side."""
    parts = Parts(config.parts)

    def progress(line: str) -> None:
        if channel.state == "restarting" or sys.stderr.isatty():  # a first start is news to nobody but who waits for it
            print(line, file=sys.stderr, flush=True)

    channel = ProcessChannel(config, progress=progress)
    timed = "step_seconds" in getattr(parts.get("metrics"), "SUPPORTS", ())
    metrics: Any = GuardedMetrics(parts) if "metrics" in parts.overrides else parts.get("metrics").Metrics()
    metered = Metered(channel, channel, metrics, timed=timed)
    engine = parts.get("async_engine").AsyncEngine(metered)
    starting = asyncio.ensure_future(engine.start())
    try:
        front = await asyncio.to_thread(Front.open, config, parts)
        create_app = await asyncio.to_thread(_load_app)
        await starting
        front.adopt(channel.ready)
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await engine.stop()
        raise
    service = Service(engine, front, channel, parts, metrics, api_key=api_key, version=version("cutaway"))
    return service, create_app(service)


async def _drain(server: uvicorn.Server, service: Service, serving: asyncio.Task[None], seconds: float) -> None:
    """Stops accepting; gives running answers so many seconds, then ends them."""
    server.should_exit = True
    if service.running:
        how_many = f"{len(service.running)} running answer{'s' if len(service.running) > 1 else ''}"
        print(f"stopping: {how_many} may take {seconds:g} s more; a second signal ends at once", file=sys.stderr, flush=True)
        await asyncio.wait(tuple(service.running), timeout=seconds)
    service.stop()
    try:
        await asyncio.wait_for(asyncio.shield(serving), 2.0)
    except TimeoutError:
        server.force_exit = True
        await serving


async def _serve(
    config: EngineConfig, sock: socket.socket, api_key: str | None, drain: float, tell: Callable[[str], None], started: float
) -> None:
    signals = Signals(asyncio.get_running_loop())
    opened = await signals.unless_stopped(_open(config, api_key))
    if opened is None:
        return
    service, app = opened
    try:
        server = _Uvicorn(
            uvicorn.Config(
                app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, date_header=True, timeout_keep_alive=30, backlog=1024,
            )
        )  # fmt: skip
        try:
            sock.listen(1024)
        except OSError as error:  # somebody took the port while the model was loading
            host, port = sock.getsockname()[:2]
            raise _no_port(host, port, error) from None
        url = url_of(sock)  # connections wait in the backlog from here on
        tell(banner(service, url, time.monotonic() - started))
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        await asyncio.wait((serving, waiter := asyncio.ensure_future(signals.stop.wait())), return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        await _drain(server, service, serving, drain)
    finally:
        await service.engine.stop()


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    drain: float = DRAIN,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. port 0 takes a free one; `drain`: seconds that running answers get then; `tell` gets
    the lines meant for people (stdout if None).

    Raises CutawayError when the port, the model or the engine is not to be had.
    """
    started = time.monotonic()
    tell = tell or (lambda line: print(line, flush=True))
    log_to_stderr()
    with bind(host, port) as sock:
        if api_key is None and not is_loopback(sock):
            print(f"warning: --host {host} lets the network in and no --api-key is set", file=sys.stderr, flush=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, sock, api_key, drain, tell, started))
