"""The routes. Bodies are read, bounded and parsed here; the answers are in answers.py, the types in protocol.py."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cutaway.core.errors import BadRequest, CutawayError, shown
from cutaway.core.request import Request as Sequence
from cutaway.server import status
from cutaway.server.answers import Answer, EventStream
from cutaway.server.errors import error_response, json_response
from cutaway.server.page import page_response
from cutaway.server.protocol import ChatBody, CompletionBody, parse
from cutaway.server.responses import Choice, Head, Kind
from cutaway.server.service import Service

MAX_BODY = 4 * 1024 * 1024  # bytes; the longest window's text is far below
MAX_DRAINED = 64 * 1024 * 1024
LARGE_BODY = 64 * 1024  # bytes; larger ones are parsed in a thread

B = TypeVar("B", ChatBody, CompletionBody)


def create_app(service: Service) -> FastAPI:
    """The server's ASGI application over one running engine. The key, if there is one, guards /v1."""
    app = FastAPI(title="Cutaway", version=service.version, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    guarded = [Depends(partial(_authorize, service))]
    for path, endpoint, body in (
        ("/v1/chat/completions", _chat(service), ChatBody),
        ("/v1/completions", _complete(service), CompletionBody),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], dependencies=guarded, openapi_extra=_body_schema(body))
    for path, endpoint in (("/v1/models", _models(service)), ("/v1/models/{name:path}", _model(service))):
        app.add_api_route(path, endpoint, methods=["GET"], dependencies=guarded)
    for path, report in (
        ("/", page_response),
        ("/health", partial(status.health, service)),
        ("/ready", partial(status.ready, service)),
        ("/metrics", status.metrics_endpoint(service)),
    ):
        app.add_api_route(path, _plain(report), methods=["GET"])
    app.add_exception_handler(CutawayError, _on_error)
    app.add_exception_handler(HTTPException, partial(_on_http_error, app))
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_middleware(Guard)
    return app


# ---- what comes before a route -----------------------------------------------------------------------------------------


def _authorize(service: Service, http: Request) -> None:
    """Raises 401 unless the bearer token is the key; compared in constant time."""
    if service.api_key is None:
        return
    scheme, _, given = http.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(
        given.strip().encode("latin-1"), service.api_key.strip().encode()
    ):
        what = "the API key is wrong" if given else "this server needs an API key"
        raise BadRequest(f"{what}: send the header Authorization: Bearer <key>", status=401, code="invalid_api_key")


async def _read(http: Request) -> bytes:
    """The body, at most MAX_BODY bytes of it. A larger one is read and dropped up to MAX_DRAINED, since a client that is cut
    off while it sends never sees why."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        got = f"got {kind[:80]}" if kind else "got none"
        raise BadRequest(f"the body must be JSON: send Content-Type: application/json ({got})", status=415)
    length = http.headers.get("content-length", "0")
    too_large = BadRequest(f"the body is larger than {MAX_BODY // 2**20} MiB", status=413, code="body_too_large")
    if not length.isdigit() or int(length) > MAX_DRAINED:
        raise too_large
    raw, size = bytearray(), 0
    async for piece in http.stream():
        size += len(piece)
        if size > MAX_DRAINED:
            raise too_large
        if size <= MAX_BODY:
            raw += piece
    if size > MAX_BODY:
        raise too_large
    return bytes(raw)


async def _body(service: Service, http: Request, kind: type[B]) -> B:
    raw = await _read(http)
    service.need_open()
    work = partial(parse, raw, kind)
    body = await service.in_thread(work) if len(raw) > LARGE_BODY else work()
    if body.model != service.front.model_name:
        raise _no_model(service, body.model)
    return body


def _no_model(service: Service, name: str) -> BadRequest:
    message = f"there is no model {shown(name)} here; this server has {service.front.model_name!r}"
    return BadRequest(message, param="model", code="model_not_found", status=404)


# ---- completions -------------------------------------------------------------------------------------------------------


def _answer(service: Service, kind: Kind, body: ChatBody | CompletionBody, requests: list[Sequence]) -> Response:
    head = Head(
        kind,
        f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}",
        int(time.time()),
        service.front.model_name,
        f"cutaway-{service.version}",
    )
    choices = [Choice(i, request, kind, service.front.tokenizer) for i, request in enumerate(requests)]
    if body.stream:
        return EventStream(service, head, choices, body.include_usage)
    return Answer(service, head, choices)


def _chat(service: Service) -> Any:
    async def chat(http: Request) -> Response:
        body = await _body(service, http, ChatBody)
        front = service.front

        def prepare() -> Sequence:
            try:
                return front.chat(body.messages, body.params())
            except BadRequest as error:
                if error.param == "max_tokens" and body.max_completion_tokens is not None:
                    error.param = "max_completion_tokens"  # by the name that the client knows
                raise

        return _answer(service, "chat", body, [await service.in_thread(prepare)])

    return chat


def _complete(service: Service) -> Any:
    async def complete(http: Request) -> Response:
        body = await _body(service, http, CompletionBody)
        front = service.front

        def prepare() -> list[Sequence]:
            return [front.complete(prompt, body.params()) for prompt in body.prompt]

        return _answer(service, "text", body, await service.in_thread(prepare))

    return complete


# ---- models, and the plain pages ---------------------------------------------------------------------------------------


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.front.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "cutaway",
        "max_model_len": service.front.window,
    }


def _models(service: Service) -> Any:
    async def models() -> Response:
        return json_response({"object": "list", "data": [_card(service)]})

    return models


def _model(service: Service) -> Any:
    async def model(name: str) -> Response:
        if name != service.front.model_name:
            raise _no_model(service, name)
        return json_response(_card(service))

    return model


def _plain(report: Any) -> Any:
    async def plain() -> Response:
        return report()

    return plain


def _body_schema(body: type[ChatBody | CompletionBody]) -> dict[str, Any]:
    """The body for /openapi.json; FastAPI would parse it itself if it stood in the signature."""
    schema = body.model_json_schema()
    inner = schema.pop("$defs", {})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, inner)}}}}


def _inlined(schema: Any, inner: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        ref = schema.get("$ref")
        if isinstance(ref, str):
            return _inlined(inner[ref.rsplit("/", 1)[-1]], inner)
        return {k: _inlined(v, inner) for k, v in schema.items()}
    return [_inlined(v, inner) for v in schema] if isinstance(schema, list) else schema


# ---- faults ------------------------------------------------------------------------------------------------------------


async def _on_error(_http: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(app: FastAPI, http: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods, in the shape of every other error."""
    assert isinstance(error, HTTPException)
    path = http.url.path[:80]
    if error.status_code == 404:
        routes = ", ".join(sorted({getattr(r, "path", "") for r in app.routes} - {"", "/v1/models/{name:path}"}))
        return error_response(BadRequest(f"there is nothing at {path}; the routes are {routes}", status=404))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        response = error_response(BadRequest(f"{path} takes {allowed}, not {http.method}", status=405))
        response.headers["allow"] = allowed
        return response
    return error_response(BadRequest(str(error.detail), status=error.status_code))


class Guard:
    """Turns a bug in a route into an error of the usual shape. Answers underway see to their own (answers.py)."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http":
                raise
            await error_response(error)(scope, receive, send)


async def _on_disconnect(_http: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it: the client left while it sent its body
