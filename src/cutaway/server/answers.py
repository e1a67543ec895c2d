"""How an answer leaves: in one piece or as server-sent events; and what ends it early (the client, the engine, a stop).

Both are ASGI responses of their own. They watch for the client's leaving from the first moment on, so a request in the
queue or in its prefill is aborted as promptly as one in the middle of its answer, streamed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cutaway.server.errors import Unavailable, describe, error_response
from cutaway.server.responses import Choice, Chunks, Head, error_event, usage_of
from cutaway.server.service import Service

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects events would undo the streaming
]
JSON_HEADERS = [(b"content-type", b"application/json")]


async def _gone(receive: Receive) -> None:
    """Returns when the client has left. The body has been read, so nothing else can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None], service: Service) -> None:
    """Runs `work`; cancels it if the client leaves."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    service.running.add(task)
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        service.running.discard(task)
        watch.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if not task.cancelled():
        task.result()


class Answer(Response):
    """An answer in one piece."""

    def __init__(self, service: Service, head: Head, choices: Sequence[Choice]):
        super().__init__()
        self.service, self.head, self.choices = service, head, choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._run(scope, receive, send), self.service)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await each([self._fill(choice) for choice in self.choices])
            body = self.head.answer(self.choices)
        except asyncio.CancelledError:
            if not self.service.closing:
                raise
            return await error_response(Unavailable("the server is shutting down"))(scope, receive, send)
        except Exception as error:
            return await error_response(error)(scope, receive, send)
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*JSON_HEADERS, length]})
        await send({"type": "http.response.body", "body": body})

    async def _fill(self, choice: Choice) -> None:
        async with aclosing(self.service.follow(choice.request)) as deltas:  # pyright: ignore[reportArgumentType]
            async for delta in deltas:
                choice.keep(delta)
        choice.cached_tokens = choice.request.num_cached


class EventStream(Response):
    """An answer as server-sent events. The response starts with the first output, so that what fails before it still
    gets an HTTP status; what fails later becomes an error event, after which the stream ends without [DONE]."""

    def __init__(self, service: Service, head: Head, choices: Sequence[Choice], include_usage: bool):
        super().__init__()
        self.service, self.choices = service, choices
        self.chunks = Chunks(head, include_usage)
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._run(scope, receive, send), self.service)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await each([self._pump(choice, send) for choice in self.choices])
            await self._send(send, self.chunks.last(usage_of(self.choices)), more=False)
        except asyncio.CancelledError:
            if not self.service.closing:
                raise
            await self._fail(Unavailable("the server is shutting down"), scope, receive, send)
        except Exception as error:
            await self._fail(error, scope, receive, send)

    async def _fail(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            return await error_response(error)(scope, receive, send)
        await self._send(send, error_event(describe(error)[1]), more=False)

    async def _pump(self, choice: Choice, send: Send) -> None:
        chunks, index = self.chunks, choice.index
        pending = chunks.first(index)
        async with aclosing(self.service.follow(choice.request)) as deltas:  # pyright: ignore[reportArgumentType]
            async for delta in deltas:
                event = chunks.delta(index, delta, choice.take(delta))
                if pending or event:
                    await self._send(send, pending + event)
                    pending = b""
        choice.cached_tokens = choice.request.num_cached

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        await send(message)


async def each(pumps: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All choices side by side; the first fault ends the others (and so aborts their requests) and is raised."""
    if len(pumps) == 1:
        return await pumps[0]
    tasks = [asyncio.ensure_future(pump) for pump in pumps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
