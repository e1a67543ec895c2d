"""The typed errors that reach a person. Each carries one line: what is wrong, and what to do.

They are raised wherever the fault is seen and caught in one place each: `cli.main` (a line on stderr, exit code 2)
and `server.app` (OpenAI's error shape). Nothing else in the project prints an error or swallows one.
"""

from __future__ import annotations


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
