"""The typed errors that reach a person. Each carries one line: what is wrong, and what to do.

They are raised wherever the fault is seen, and become something that a person sees in one place each: `cli.run` (a line on
stderr, exit code 2) and `server.errors` (OpenAI's error shape). What goes wrong in the engine process crosses as its line.
"""

from __future__ import annotations

MAX_SHOWN = 80  # characters of somebody's value in a message


def shown(value: object) -> str:
    """A value in a message: as Python writes it, which escapes line breaks, and cut to one short line."""
    text = repr(value if not isinstance(value, (str, bytes, list)) else value[:MAX_SHOWN])
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


class CutawayError(Exception):
    """A fault that a person can mend. `str(error)` is one line, without a traceback's vocabulary."""


class BadRequest(CutawayError):
    """A request that cannot be served as it stands.

    `param` names the field at fault (or None), `code` is a short stable word for programs, `status` the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class DoesNotFit(BadRequest):
    """A request that could never run: more tokens than the window, or more blocks than the whole pool has."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message, param=param, code="context_length_exceeded")


class CheckpointError(CutawayError):
    """A model on disk that is missing, truncated, hostile or of a kind that is not supported."""


class EngineDied(CutawayError):
    """The engine process ended while requests were running; they fail with this, and the engine is restarted."""
