"""A load client on bare asyncio streams: it shares the cores with the server it measures, so it must cost next to nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cutaway.core.errors import CutawayError

HOST = "127.0.0.1"


@dataclass(slots=True)
class Answer:
    """One streamed completion. Times from time.perf_counter; `tokens` as the server's usage counts them."""

    sent: float
    times: list[float] = field(default_factory=list[float])  # arrival of each event that carries text
    tokens: int = 0
    text: str = ""
    end: float = 0.0

    @property
    def ttft(self) -> float:
        return (self.times[0] if self.times else self.end) - self.sent


async def _open(port: int, method: str, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int, bool]:
    """Sends one request; answers the streams, the status, and whether the body comes in chunks."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b""):
        chunked |= line.lower().startswith(b"transfer-encoding:") and b"chunked" in line.lower()
    return reader, writer, status, chunked


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        yield await reader.read()
        return
    while size := int(await reader.readline() or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def request(port: int, method: str, path: str, body: Any = None, timeout: float = 30.0) -> tuple[int, Any]:
    """Status and decoded JSON (or text) of one plain request. Raises OSError while nothing listens."""
    async with asyncio.timeout(timeout):
        reader, writer, status, chunked = await _open(port, method, path, b"" if body is None else json.dumps(body).encode())
        data = b"".join([piece async for piece in _pieces(reader, chunked)])
        writer.close()
    try:
        return status, json.loads(data)
    except ValueError:
        return status, data.decode(errors="replace")


async def complete(port: int, model: str, prompt: Sequence[int], max_tokens: int, timeout: float = 300.0) -> Answer:
    """Streams one greedy completion of token ids that end-of-sequence does not end. An error event raises CutawayError."""
    fixed = {"stream": True, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"model": model, "prompt": list(prompt), "max_tokens": max_tokens, **fixed}).encode()
    answer, held = Answer(sent=time.perf_counter()), b""
    async with asyncio.timeout(timeout):
        reader, writer, status, chunked = await _open(port, "POST", "/v1/completions", body)
        async for piece in _pieces(reader, chunked):
            now = time.perf_counter()
            held += piece
            *events, held = held.split(b"\n\n")
            for event in events if status == 200 else ():
                _read(event, now, answer)
        writer.close()
    if status != 200:
        raise CutawayError(f"the server answered {status}: {held.decode(errors='replace')[:200]}")
    answer.end = time.perf_counter()
    return answer


def _read(event: bytes, now: float, answer: Answer) -> None:
    data = event.removeprefix(b"data: ")
    if not event.startswith(b"data: ") or data.strip() == b"[DONE]":
        return
    message = json.loads(data)
    if "error" in message:
        raise CutawayError(f"the server ended a stream: {message['error'].get('message', message['error'])}")
    if any(choice.get("text") for choice in message.get("choices", ())):
        answer.times.append(now)
        answer.text += message["choices"][0]["text"]
    if message.get("usage"):
        answer.tokens = message["usage"]["completion_tokens"]


def load(port: int, model: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, list[Answer]]:
    """All prompts at once, one client each. Wall seconds from the first request to the last token, and the answers."""

    async def everyone() -> list[Answer]:
        return await asyncio.gather(*(complete(port, model, prompt, max_tokens) for prompt in prompts))

    began = time.perf_counter()
    answers = asyncio.run(everyone())
    return max(a.end for a in answers) - began, answers


def get(port: int, path: str) -> tuple[int, Any]:
    return asyncio.run(request(port, "GET", path))
