"""The engine process: `python -m cutaway.engine.process SOCKET`, started by `engine.channel.ProcessChannel`.

It knows ids only. It takes messages between steps, without waiting while there is work and asleep when there is none.
It ends by Stop, in order; by its standard input closing, at once; or by SIGKILL. The front holds the other end of that
input, which the kernel closes however the front dies. SIGINT and SIGTERM are ignored: Ctrl-C reaches a whole terminal
group and a service manager's SIGTERM a whole control group, while the front still lets running answers end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from cutaway.checkpoints import open_checkpoint, resolve
from cutaway.core.errors import CutawayError
from cutaway.core.plan import Backend, Limits
from cutaway.core.request import FinishReason, Output
from cutaway.engine import messages
from cutaway.engine.config import EngineConfig
from cutaway.engine.engine import Engine
from cutaway.engine.faults import Watch, find, one_line
from cutaway.engine.parts import PartFault, Parts, load_module
from cutaway.engine.shadow import parts_of
from cutaway.engine.trace import TraceWriter

LINGER = 2000  # milliseconds given to the last message
TELL = 1.0  # seconds between two reports of the parts, at least, while there is work


def load_backend(config: EngineConfig, parts: Parts) -> Backend:
    """What `config.backend` creates. Raises CutawayError that names the library that it lacks."""
    module, _, function = config.backend.rpartition(":")
    if not module:
        raise CutawayError(f'backend must be "module:function", got {config.backend!r}')
    try:
        create = getattr(load_module(module), function)
    except ModuleNotFoundError as error:
        name = str(error.name)
        if name.split(".")[0] == "cutaway":
            raise CutawayError(f"there is no backend {config.backend}: {error}") from None
        remedy = "pip install '.[torch]' in a checkout, or pip install torch" if name == "torch" else f"pip install {name}"
        raise CutawayError(f"the backend {module} needs {name}, which is not installed: {remedy}") from None
    except AttributeError:
        raise CutawayError(f"there is no backend {config.backend}: {module} has no {function}") from None
    return create(config, parts)


def build(config: EngineConfig, parts: Parts) -> tuple[Engine, dict[str, Any]]:
    """The engine that `config` asks for, and its figures: window, block_size, kv_blocks, limits, parts, backend.

    The window is what one sequence may hold: the model's (or `max_model_len`), at most what the whole pool has room for.
    """
    parts.load("engine")
    backend = load_backend(config, parts)
    facts: dict[str, Any] = getattr(backend, "info", dict[str, Any])()
    kv = backend.kv()
    window = config.max_model_len or facts.get("window")
    if window is None:
        window = open_checkpoint(resolve(config.model), config.load_format).config.max_position
    limits = Limits(
        rows=config.max_num_seqs,
        budget=config.max_num_batched_tokens,
        chunk=config.max_num_batched_tokens,
        window=min(window, (kv.num_blocks - 1) * kv.block_size),
        block_size=kv.block_size,
    )
    trace = TraceWriter(config.trace) if config.trace else None
    engine = Engine(
        backend, parts, limits, prefix_cache=config.prefix_cache, depth=config.depth, preemption=config.preemption, trace=trace
    )
    info = {
        "window": limits.window,
        "block_size": limits.block_size,
        "kv_blocks": kv.num_blocks,
        "kv_bytes": kv.num_blocks * kv.bytes_per_block,
        "rows": limits.rows,
        "budget": limits.budget,
        "depth": config.depth,
        "prefix_cache": config.prefix_cache,
        "preemption": config.preemption,
        "backend": facts,
        "parts": parts.report(),
    }
    return engine, info


Receive = Callable[[bool], Sequence[messages.ToEngine]]  # (wait for one?) -> what has arrived
Send = Callable[[messages.ToFront], None]


def drive(engine: Engine, receive: Receive, send: Send) -> None:
    """Messages, a step, its outputs; until Stop. A request that the engine refuses fails alone, with its line."""
    while True:
        outputs: list[Output] = []
        arrived = receive(not engine.has_work)
        for message in arrived:
            match message:
                case messages.Add():
                    for new in message.requests:
                        try:
                            engine.add(new.request())
                        except CutawayError as error:
                            outputs.append(Output(new.id, [], finish_reason=FinishReason.ERROR, error=one_line(error)))
                case messages.Abort():
                    engine.abort(message.ids)
                case messages.Stop():
                    return
                case messages.Start():
                    raise CutawayError("the engine process was told to start twice")
        if engine.has_work:
            outputs += engine.step()
        send(messages.Outputs(outputs, engine.stats()))


class Link:
    """The engine's end of the socket."""

    def __init__(self, path: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # never drop, never block: the front always reads
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER)
        self._socket.connect(f"ipc://{path}")
        self._decoder = messages.engine_decoder()

    def receive(self, wait: bool) -> list[messages.ToEngine]:
        arrived: list[messages.ToEngine] = []
        if wait:
            arrived.append(self._decoder.decode(self._socket.recv()))
        with contextlib.suppress(zmq.Again):
            while True:
                arrived.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        return arrived

    def send(self, message: messages.ToFront) -> None:
        self._socket.send(messages.encode(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()  # waits for the last message, at most LINGER


def run(link: Link, folder: Path) -> None:
    """Loads what the first message asks for and serves it. Raises what goes wrong; PartFault where a part is at fault."""
    start, *rest = link.receive(wait=True)
    if not isinstance(start, messages.Start):
        raise CutawayError("the first message to an engine process must be Start")
    sys.path[:] = start.path
    link.send(messages.Loading(f"loading {start.config.model}"))
    parts = parts_of(start.config)

    def tell(fault: PartFault) -> None:
        """The main thread will not come back, and the socket is its own."""
        message = messages.Failed(one_line(fault), fault.parts, hung=True)
        (folder / messages.LAST_WORDS).write_bytes(messages.encode(message))
        os._exit(1)

    try:
        _serve(link, start.config, parts, rest, Watch(parts, tell))
    except BaseException as error:  # a part may well call sys.exit
        if fault := find(parts, error):
            raise fault from error
        raise


def _serve(link: Link, config: EngineConfig, parts: Parts, backlog: list[messages.ToEngine], watch: Watch) -> None:
    engine, info = build(config, parts)
    gc.collect()
    gc.freeze()  # what is loaded lives as long as the process: the collector need not walk it in every full pass
    link.send(messages.Ready(info))

    def receive(wait: bool) -> list[messages.ToEngine]:
        watch.idle()
        first, backlog[:] = list(backlog), []
        arrived = first + link.receive(wait and not first)
        watch.begin()
        return arrived

    told, when = info["parts"], time.monotonic()

    def send(message: messages.ToFront) -> None:
        nonlocal told, when
        link.send(message)
        if not (parts.overrides or parts.shadows) or (engine.has_work and time.monotonic() - when < TELL):
            return
        if (report := parts.report()) != told:  # the reference has played in a part's place, or a shadow went on
            told, when = report, time.monotonic()
            link.send(messages.Ready(info | {"parts": report}))

    drive(engine, receive, send)


def _end_with_parent(folder: Path) -> None:
    """Sleeps until standard input closes, which is when the front has ended; then nobody is left to answer to."""
    waiter = select.poll()
    waiter.register(0, select.POLLIN)
    while True:
        waiter.poll()
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 1):
                break
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Exit status: 0 after Stop, 1 after a fault, which the front has been told in one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if len(sys.argv) != 2:
        sys.exit("usage: python -m cutaway.engine.process SOCKET (the front starts this; `cutaway serve` is for people)")
    path = Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(path.parent,), daemon=True).start()
    link = Link(str(path))
    status = 0
    try:
        run(link, path.parent)
    except Exception as error:
        status = 1
        if os.environ.get("CUTAWAY_DEBUG") == "1":
            traceback.print_exc()
        link.send(messages.Failed(one_line(error), error.parts if isinstance(error, PartFault) else []))
    finally:
        link.close()
    sys.exit(status)


if __name__ == "__main__":
    main()
