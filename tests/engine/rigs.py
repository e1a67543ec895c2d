"""What the tests of the processes share: bounded asyncio, an engine on the fake backend, requests by hand."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from cutaway.core.request import FinishReason, Output, Request, SamplingParams
from cutaway.engine.async_engine import AsyncEngine
from cutaway.engine.channel import InProcessChannel, ProcessChannel
from cutaway.engine.config import EngineConfig

T = TypeVar("T")
AnyChannel = InProcessChannel | ProcessChannel


def run(work: Coroutine[Any, Any, T], seconds: float = 120) -> T:
    """asyncio.run, bounded: a test that would hang fails."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(bounded())


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what is waited for is often another process's
            await asyncio.sleep(0.005)


def fake(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"model": "fake", "backend": "cutaway.backends.fake:create", "max_model_len": 512} | settings)


def ask(id: int, prompt: int = 20, max_tokens: int = 8, **params: Any) -> Request:
    tokens = [(id * 31 + i * 7) % 1000 for i in range(prompt)]
    return Request(id, tokens, SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens} | params))


@asynccontextmanager
async def running(channel: AnyChannel) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(channel)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def collect(engine: AsyncEngine, request: Request) -> Output:
    """All outputs of a request as one."""
    whole = Output(request.id, [])
    async with aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            whole.token_ids += output.token_ids
            whole.finish_reason, whole.stop_reason, whole.error = output.finish_reason, output.stop_reason, output.error
            whole.num_cached = max(whole.num_cached, output.num_cached)
    return whole


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


LENGTH = FinishReason.LENGTH


def backend(tmp_path: Path, text: str) -> str:
    """The import string of a backend of the test's own."""
    file = tmp_path / "backend.py"
    file.write_text("import os, time\nfrom cutaway.core.errors import CutawayError\nfrom cutaway.backends import fake\n" + text)
    return f"{file}:create"
