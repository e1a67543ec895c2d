"""OpenAI's error shape, and how every fault becomes one: a typed error, a validation error, a wrong route, a bug.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}}

The message is one line that names the field, says what is wrong and what is allowed.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from cutaway.core.errors import MAX_SHOWN, BadRequest, CutawayError, EngineDied

log = logging.getLogger("cutaway.server")


class Unavailable(CutawayError):
    """The server cannot take this request now; the client may try again."""


class EngineFault(CutawayError):
    """The engine failed this request, and goes on with others."""


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The object that every error of this server is."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of any exception. What is not a typed error is a bug: it is logged, and its text kept inside."""
    if isinstance(error, BadRequest):
        return error.status, error_body(str(error), "invalid_request_error", error.param, error.code or _code(error.status))
    if isinstance(error, EngineDied):
        return 503, error_body(str(error), "server_error", code="engine_died")
    if isinstance(error, Unavailable):
        return 503, error_body(str(error), "server_error", code="unavailable")
    if isinstance(error, CutawayError):
        return 500, error_body(str(error), "server_error", code="engine_error")
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {frame[0].filename}:{frame[0].lineno}" if frame else ""
    log.error("internal error: %s: %s%s", type(error).__name__, error, where)
    log.debug("where it came from", exc_info=error)
    message = f"internal error ({type(error).__name__}); the server's log says where, and the server goes on"
    return 500, error_body(message, "server_error", code="internal_error")


def _code(status: int) -> str:
    return {400: "invalid_value", 401: "invalid_api_key", 404: "not_found"}.get(
        status, HTTPStatus(status).phrase.lower().replace(" ", "_").replace("-", "_")
    )


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response, encoded once and without pydantic."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: BaseException) -> Response:
    status, body = describe(error)
    headers: dict[str, str] = {}
    if status == 503:
        headers["retry-after"] = "2"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 413:
        headers["connection"] = "close"
    return json_response(body, status, headers)


def log_to_stderr(level: int = logging.WARNING) -> None:
    """Warnings and errors of the server, one line each, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("cutaway: %(levelname)s: %(message)s"))
    for name in ("cutaway", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


# ---- validation errors, in words -------------------------------------------------------------------------------------

_WANTED = {
    "string_type": "a string",
    "float_type": "a number",
    "int_type": "an integer",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def path_of(loc: Sequence[int | str]) -> str:
    """("messages", 0, "content") -> messages[0].content"""
    path = ""
    for step in loc:
        word = shown(step)[1:-1]  # a key of the body is anybody's text
        path += f"[{step}]" if isinstance(step, int) else f".{word}" if path else word
    return path


def shown(value: object) -> str:
    """A value as JSON, cut to one short line."""
    text = msgspec.json.encode(value, enc_hook=repr).decode()
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def from_validation(error: ValidationError, known: Sequence[str], later: Sequence[str]) -> BadRequest:
    """The first fault of a body as one line. known: the fields taken; later: OpenAI fields that are not."""
    details = error.errors(include_url=False)
    # an unsupported field explains other faults more often than the reverse
    first = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    return _one_line(first, known, later)


def _one_line(fault: ErrorDetails, known: Sequence[str], later: Sequence[str]) -> BadRequest:
    param = path_of(fault["loc"]) or None
    kind = fault["type"]
    if kind == "extra_forbidden":
        if len(fault["loc"]) == 1 and fault["loc"][0] in later:
            return BadRequest(
                f"{param} is not supported by this server; leave it out", param=param, code="unsupported_parameter"
            )
        fields = f"; known fields: {', '.join(known)}" if len(fault["loc"]) == 1 else "; leave it out"
        return BadRequest(f"{param} is not a known field{fields}", param=param, code="unknown_parameter")
    if kind == "missing":
        return BadRequest(f"{param} is required", param=param, code="missing_required_parameter")
    if kind == "value_error":
        raised = fault.get("ctx", {}).get("error")
        if isinstance(raised, BadRequest):  # a check of protocol.py, with its own words
            return raised
    if kind == "literal_error":
        wanted = fault.get("ctx", {}).get("expected", "another value").replace("'", '"')
    else:
        wanted = _WANTED.get(kind)
    if wanted is None:
        return BadRequest(f"{param}: {fault['msg']}", param=param, code="invalid_value")
    where = param or "the body"
    code = "invalid_value" if kind == "literal_error" else "invalid_type"
    return BadRequest(f"{where} must be {wanted}, got {shown(fault['input'])}", param=param, code=code)
