"""The way from the front to an engine: `ProcessChannel` to one of its own process, `InProcessChannel` to a thread.

Both speak `engine.messages` and are what part 15 is given. A process channel watches its engine: when the process ends,
every request it held fails with one line, and a new process is started with the same settings. Requests that come
meanwhile wait for that one start, and fail with its line if it fails. The first end is mended at once; each further one
with no request finished since is followed by a longer pause (1, 2, 4, ... 30 s), so that a request which kills its engine
slows the server and never takes it down. Three starts that fail with no request finished between, however long they
took, mean that there is nothing to be had: the channel gives up, `state` is "failed", and `failure` says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from cutaway.core.errors import CutawayError, EngineDied
from cutaway.core.request import FinishReason, Output, Request
from cutaway.engine import messages
from cutaway.engine.child import Child
from cutaway.engine.config import EngineConfig
from cutaway.engine.engine import Stats
from cutaway.engine.faults import Faults, find, one_line
from cutaway.engine.process import build, drive
from cutaway.engine.shadow import parts_of

State = Literal["starting", "ready", "restarting", "failed", "stopping", "stopped"]

FAILED_STARTS = 3
PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds before a restart: after the first end since a request finished, ...


class _Channel:
    """What both have. state, failure (why the engine ended last), ready (`engine.process.build`'s figures; empty while no
    engine is up) and stats (of its last step; None before the first) are for `/health`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.state: State = "stopped"
        self.failure: str | None = None
        self.ready: dict[str, Any] = {}
        self.stats: Stats | None = None
        self._waiting: dict[int, Request] = {}  # not given to an engine yet
        self._live: set[int] = set()  # given to it and not finished
        self._steps: asyncio.Queue[list[Output] | None] = asyncio.Queue()
        self._given_up = False
        self._settled = asyncio.Event()  # the first start has worked, or has not

    def add(self, request: Request) -> None:
        """Never waits; requests of one turn of the loop leave together. Raises EngineDied where there will be no engine."""
        if self.state in ("failed", "stopping", "stopped"):
            raise EngineDied(self.failure or "the engine is not running")
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting[request.id] = request

    def abort(self, ids: Sequence[int]) -> None:
        """In any state; ids that are not underway are nothing."""
        for id in ids:
            self._waiting.pop(id, None)
        sent = [id for id in ids if id in self._live]
        self._live.difference_update(sent)
        if sent and self.state == "ready":
            self._send(messages.Abort(sent))

    async def receive(self) -> list[Output]:
        """The next step's outputs, in order, none dropped. Raises EngineDied when the engine is gone for good."""
        outputs = await self._steps.get()
        if outputs is None:
            self._steps.put_nowait(None)
            raise EngineDied(self.failure or "the engine was stopped")
        return outputs

    def _send(self, message: messages.ToEngine) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        if self.state == "ready" and self._waiting:
            batch, self._waiting = self._waiting, {}
            self._give(list(batch.values()))

    def _give(self, requests: Sequence[Request]) -> None:
        """To the engine, in one message. A request that no message can hold fails alone."""
        try:
            self._send(messages.Add([messages.NewRequest.of(request) for request in requests]))
            self._live.update(request.id for request in requests)
        except Exception as error:  # an integer beyond 64 bits, a type that is not MessagePack's
            if len(requests) == 1:
                line = f"the request cannot be sent to the engine: {one_line(error)}"
                self._steps.put_nowait([Output(requests[0].id, [], finish_reason=FinishReason.ERROR, error=line)])
            else:
                for request in requests:
                    self._give([request])

    def _handle(self, message: messages.ToFront) -> None:
        match message:
            case messages.Ready():
                self.ready = message.info
                if self.state in ("starting", "restarting"):
                    self.state = "ready"
                    self._settled.set()
                    self._flush()
            case messages.Outputs():
                self.stats = message.stats
                self._live -= {o.id for o in message.outputs if o.finish_reason is not None or o.error is not None}
                self._steps.put_nowait(message.outputs)
            case messages.Loading() | messages.Failed():
                pass

    def _fail(self, ids: Iterable[int], line: str) -> None:
        self.ready, self.stats = {}, None  # they were the dead engine's
        self._steps.put_nowait([Output(id, [], finish_reason=FinishReason.ERROR, error=line) for id in sorted(ids)])
        self._live.clear()

    def _give_up(self, line: str) -> None:
        self.failure, self.state, self._given_up = line, "failed", True
        self._fail([*self._live, *self._waiting], line)
        self._waiting.clear()
        self._steps.put_nowait(None)
        self._settled.set()


class InProcessChannel(_Channel):
    """The engine on a thread of this process, for tests and for embedding. It is not restarted."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._inbox: queue.SimpleQueue[messages.ToEngine] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Returns when the engine is ready. Raises CutawayError with its one line when it cannot start."""
        self.state = "starting"
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="cutaway-engine", daemon=True)
        self._thread.start()
        await self._settled.wait()
        if self.failure is not None:
            raise CutawayError(self.failure)

    async def stop(self) -> None:
        if self._thread is not None:
            self._inbox.put(messages.Stop())
            await asyncio.to_thread(self._thread.join)
        self.state = "stopped"

    def _send(self, message: messages.ToEngine) -> None:
        self._inbox.put(message)

    def _handle(self, message: messages.ToFront) -> None:
        super()._handle(message)
        if isinstance(message, messages.Failed):
            self._give_up(message.line)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        def send(message: messages.ToFront) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed without stop()
                loop.call_soon_threadsafe(self._handle, message)

        parts = parts_of(self.config)
        try:
            engine, info = build(self.config, parts)
            send(messages.Ready(info))
            drive(engine, self._receive, send)
        except Exception as error:
            send(messages.Failed(one_line(find(parts, error) or error)))

    def _receive(self, wait: bool) -> list[messages.ToEngine]:
        arrived: list[messages.ToEngine] = [self._inbox.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:
                arrived.append(self._inbox.get_nowait())
        return arrived


class ProcessChannel(_Channel):
    """The engine in a process of its own, over ZeroMQ on an ipc socket in a folder that only this user may enter.

    `progress` hears what the engine is busy with while it starts, and why it is restarted or given up. `start_timeout`
    bounds each start, `stop_timeout` the time a running step gets to end before the process is killed. Restarts are counted
    in `restarts`. A restarted engine writes its trace to FILE.1, FILE.2, ..., so that the one of what went wrong stays.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[str], None] | None = None,
        start_timeout: float = 600.0,
        stop_timeout: float = 5.0,
    ) -> None:
        super().__init__(config)
        self.restarts = 0
        self._progress = progress
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._fault: messages.Failed | None = None  # what the engine process said of its own fault
        self._faults = Faults(config.parts)
        self._came_up = False  # whether this process has been ready
        self._ends = self._failed_starts = 0  # since a request finished last
        self._engine: Child | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def dropped(self) -> dict[str, str]:
        """Parts whose place the engine's own has taken, and why, in one line."""
        return self._faults.dropped

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return self._engine.process.pid if self._engine is not None else None

    async def start(self) -> None:
        """Returns when the engine is ready. Raises CutawayError with its one line when it cannot start."""
        self.state = "starting"
        self._supervisor = asyncio.create_task(self._supervise())
        try:
            await self._settled.wait()
        except asyncio.CancelledError:
            await self.stop()
            raise
        if self._given_up:
            await self.stop()
            raise CutawayError(self.failure or "")

    async def stop(self) -> None:
        """Ends the process in order: asked, then killed; one that still loads is killed. Leaves no process and no folder.
        Twice is nothing."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        asked = self.state == "ready"
        self.state = "stopping"
        try:
            if asked:
                self._send(messages.Stop())
                await asyncio.wait({supervisor}, timeout=self._stop_timeout)
        finally:
            supervisor.cancel()  # which kills what is left
            await asyncio.gather(supervisor, return_exceptions=True)
            self._fail([*self._live, *self._waiting], "the engine was stopped")
            self.state = "stopped"

    def _send(self, message: messages.ToEngine) -> None:
        assert self._engine is not None
        self._engine.socket.send(messages.encode(message))  # answers at once: the queue to the engine has no bound

    def _handle(self, message: messages.ToFront) -> None:
        super()._handle(message)
        match message:
            case messages.Loading():
                self._say(message.line)
            case messages.Outputs():
                if any(o.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for o in message.outputs):
                    self._ends = self._failed_starts = 0
            case messages.Failed():
                self._fault = message
            case messages.Ready():
                self._came_up = True

    def _say(self, line: str) -> None:
        if self._progress is not None:
            self._progress(line)

    async def _supervise(self) -> None:
        """One process after the other."""
        while True:
            self._fault, self._came_up = None, False
            try:
                reason = await self._life()
            except Exception as error:  # no process to be had, no space for its socket
                reason = f"the engine process cannot be started: {one_line(error)}"
            if self.state == "stopping":
                return
            fault = self._fault or messages.Failed(reason)
            if self.state == "starting" and not fault.hung:
                return self._give_up(reason)
            instead = ""
            if dropped := self._faults.note(fault.parts, fault.line, fault.hung):
                instead = f" with the engine's own {' and '.join(dropped)}"
                self._ends = self._failed_starts = 0  # it is not the one that failed
            self._ends += 1
            self._failed_starts += not (self._came_up or dropped)
            if self._failed_starts >= FAILED_STARTS:
                self._say(line := f"{reason}; given up after {FAILED_STARTS} starts that failed")
                return self._give_up(line)
            self.state, self.failure = "restarting", reason
            self.restarts += 1
            pause = PAUSES[min(self._ends, len(PAUSES)) - 1]
            self._say(f"{reason}; restarting it{instead}{f' in {pause:g} s' if pause else ''}")
            if not (self._came_up or dropped):  # those who waited for it hear of it, too
                self._live.update(self._waiting)
                self._waiting.clear()
            self._fail(self._live, f"{reason}; it is being restarted{instead}, send the request again")
            await asyncio.sleep(pause)

    async def _life(self) -> str:
        """Starts one process and stays until it has ended; answers why it did, in one line."""
        config = replace(self.config, parts=self._faults.kept)
        if config.trace is not None and self.restarts:
            config = replace(config, trace=f"{config.trace}.{self.restarts}")
        engine = self._engine = Child()
        reader = asyncio.create_task(engine.read(config, self._handle))
        ended = asyncio.create_task(engine.end())
        try:
            done, _ = await asyncio.wait({ended, reader}, timeout=self._start_timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done and self.state in ("starting", "restarting"):
                return f"the engine process did not start within {self._start_timeout:g} s"
            await asyncio.wait({ended, reader}, return_when=asyncio.FIRST_COMPLETED)
            if self.state == "ready":
                self.state, self.ready = "restarting", {}  # from now on requests wait for the next process
            if reader.done():
                return f"the engine process sent what cannot be read: {reader.exception()}"
            await engine.drain()
            self._fault = self._fault or engine.last_words()
            return self._reason(ended.result())
        finally:
            reader.cancel()
            ended.cancel()
            self._engine = None
            engine.close()

    def _reason(self, status: int) -> str:
        if self._fault is not None:
            line = self._fault.line
            return line if self.state == "starting" and not self._fault.hung else f"the engine process failed ({line})"
        how = f"exit status {status}"
        if status < 0:
            how = signal.Signals(-status).name
            if status == -signal.SIGKILL:
                how += ", which the system also sends when memory is short"
        line = f"the engine process ended ({how})"
        if -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):  # from outside
            return line
        line = self._faults.without_a_word(line)
        self._fault = messages.Failed(line, self._faults.suspects)
        return line
