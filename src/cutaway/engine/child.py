"""One engine process, and the front's end of the socket to it, in a folder that only this user may enter."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

import zmq
import zmq.asyncio

from cutaway.engine import messages
from cutaway.engine.config import EngineConfig

DRAIN_SECONDS = 0.05  # what a process said before it ended has arrived when it was silent for so long
LONGEST_PATH = 90  # a socket's path may have 104 bytes on macOS, 108 on Linux


class Child:
    """Made, it is started; `close` leaves neither a process nor a folder."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="cutaway-")  # of mode 0700
        if len(self._folder) > LONGEST_PATH:
            os.rmdir(self._folder)
            self._folder = tempfile.mkdtemp(prefix="cutaway-", dir="/tmp")
        path = f"{self._folder}/engine"
        self._context = zmq.asyncio.Context()
        stdin, self._lifeline = os.pipe()  # the process ends when this end closes, so also when the front is killed
        self._num_read = 0
        try:
            self.socket = self._context.socket(zmq.PAIR)
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                self.socket.setsockopt(option, 0)  # no bounds, so nothing is dropped; nothing is kept for a dead engine
            self.socket.bind(f"ipc://{path}")
            # Its standard output is our standard error: a learner's print is seen and never mixed into an answer.
            # A process group of its own: Ctrl-C in a terminal is the front's to handle.
            # -P: no module of the folder that it happens to be started in can pass for a library's.
            command = [sys.executable, "-P", "-m", "cutaway.engine.process", path]
            self.process = subprocess.Popen(command, stdin=stdin, stdout=2, process_group=0)
        except BaseException:
            self._release()
            raise
        finally:
            os.close(stdin)

    async def read(self, config: EngineConfig, handle: Callable[[messages.ToFront], None]) -> None:
        decoder = messages.front_decoder()
        await self.socket.send(messages.encode(messages.Start(config, sys.path)))
        while True:
            handle(decoder.decode(await self.socket.recv()))
            self._num_read += 1

    async def drain(self) -> None:
        """What the process said before it ended is still on its way through the socket."""
        before = -1
        while before != self._num_read:
            before = self._num_read
            await asyncio.sleep(DRAIN_SECONDS)

    def last_words(self) -> messages.Failed | None:
        """What the process has left in the folder, where it could not send it."""
        try:
            with open(f"{self._folder}/{messages.LAST_WORDS}", "rb") as file:
                message = messages.front_decoder().decode(file.read())
        except FileNotFoundError:
            return None
        return message if isinstance(message, messages.Failed) else None

    async def end(self) -> int:
        """The exit status, negative for a signal. Waits on a thread of its own, so at any time and in any loop."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wait() -> None:
            self.process.wait()
            with contextlib.suppress(RuntimeError):  # the loop was closed before the process ended
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=wait, name="cutaway-watch", daemon=True).start()
        await ended.wait()
        return self.process.returncode

    def close(self) -> None:
        """No process and no folder is left after this."""
        self.process.kill()
        self.process.wait()
        self._release()

    def _release(self) -> None:
        os.close(self._lifeline)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
