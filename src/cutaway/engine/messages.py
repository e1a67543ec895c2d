"""What the front and the engine process say to each other: msgspec structs, packed as MessagePack arrays.

Ids, settings and counts only; no text and no code crosses. One message may carry many requests (those that arrived in
one turn of the front's loop) or many outputs (those of one step).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from cutaway.core.request import Output, Request, SamplingParams
from cutaway.engine.config import EngineConfig
from cutaway.engine.engine import Stats

LAST_WORDS = "last_words"


class NewRequest(msgspec.Struct, array_like=True):
    """What the front fills of a `Request`, but for its stop strings, which are text; the rest is born in the engine."""

    id: int
    tokens: list[int]
    params: SamplingParams
    stop_ids: list[int]
    hashes: list[bytes]

    @classmethod
    def of(cls, request: Request) -> NewRequest:
        params = replace(request.params, stop=[]) if request.params.stop else request.params
        return cls(request.id, request.tokens, params, sorted(request.stop_ids), request.hashes)

    def request(self) -> Request:
        return Request(self.id, list(self.tokens), self.params, frozenset(self.stop_ids), list(self.hashes))


class Start(msgspec.Struct, array_like=True, tag=True):
    """The first message: the settings, which are thereby in no argument list and no environment, and the front's
    `sys.path`, so that import strings mean the same in both processes."""

    config: EngineConfig
    path: list[str]


class Add(msgspec.Struct, array_like=True, tag=True):
    requests: list[NewRequest]


class Abort(msgspec.Struct, array_like=True, tag=True):
    ids: list[int]


class Stop(msgspec.Struct, array_like=True, tag=True):
    pass


class Loading(msgspec.Struct, array_like=True, tag=True):
    """What the engine process is busy with before it is ready."""

    line: str


class Ready(msgspec.Struct, array_like=True, tag=True):
    """Figures of the engine (`engine.process.build`), for the banner and /health; sent again when they change."""

    info: dict[str, Any]


class Outputs(msgspec.Struct, array_like=True, tag=True):
    outputs: list[Output]
    stats: Stats


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The last message of an engine process that could not start or go on: one line; the parts at fault, if it was theirs;
    whether they never came back, in which case this is in the file `LAST_WORDS` beside the socket, not sent through it."""

    line: str
    parts: list[str] = []
    hung: bool = False


ToEngine = Start | Add | Abort | Stop
ToFront = Loading | Ready | Outputs | Failed


def encode(message: ToEngine | ToFront) -> bytes:
    return msgspec.msgpack.encode(message)


def engine_decoder() -> msgspec.msgpack.Decoder[ToEngine]:
    """For the engine process; msgspec compiles the types, so one is kept for all messages."""
    return msgspec.msgpack.Decoder(ToEngine)


def front_decoder() -> msgspec.msgpack.Decoder[ToFront]:
    return msgspec.msgpack.Decoder(ToFront)
