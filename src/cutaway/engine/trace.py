"""What each step decided, as JSONL: one object a step, the same from any engine that took the same decisions.

A line is written when the step has answered: `free`, `cached` and `used` count blocks after its result was applied, `waiting`
is the queue as the step left it. A request that is aborted after the last step is in no line's `finished`.

Request ids are numbered in the order in which they appear, block ids in the order of first use (the dummy block stays 0), so
that two runs that differ in names alone write the same lines. Times are kept only where asked for. The format is
`server/trace.schema.json`; `./vc diff-trace A B` prints what `diff_traces` finds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TextIO

from cutaway.core.errors import CutawayError
from cutaway.core.plan import Schedule
from cutaway.core.request import Request

Record = dict[str, Any]


class BlockCounts(Protocol):
    """Of `engine.Stats`: blocks after the step; `used` includes the dummy block."""

    free: int
    cached: int
    used: int


@dataclass(slots=True)
class StepTrace:
    """A step that was submitted and has not answered: its line so far, when it was submitted (seconds), and the requests
    whose end an earlier line told before that: neither this line nor a later one is about them."""

    record: Record
    submitted: float
    gone: list[int]


@dataclass(slots=True)
class Names:
    """Canonical numbers of one trace: requests in the order of appearance, blocks in the order of first use."""

    requests: dict[int, int] = field(default_factory=dict[int, int])
    blocks: dict[int, int] = field(default_factory=lambda: {0: 0})
    num_requests: int = 0  # that have appeared

    def request(self, id: int) -> int:
        if id not in self.requests:
            self.requests[id] = self.num_requests
            self.num_requests += 1
        return self.requests[id]

    def block(self, id: int) -> int:
        return self.blocks.setdefault(id, len(self.blocks))

    def canonical(self, record: Record) -> Record:
        """The record with canonical ids. Records of one trace must come in its order."""
        rows = [
            {**row, "id": self.request(row["id"]), "blocks": [self.block(b) for b in row["blocks"]]} for row in record["rows"]
        ]
        lists = {name: [self.request(id) for id in record[name]] for name in ("waiting", "preempted", "admitted", "finished")}
        copies = [[self.block(source), self.block(target)] for source, target in record["copies"]]
        return {**record, "rows": rows, **lists, "copies": copies}


class TraceWriter:
    """Writes a line a step, in the order of the steps, flushed: a trace of a crash ends with the last finished step.

    A file that cannot be opened raises CutawayError. One that cannot be written to later (its disk is full) is said once on
    standard error and closed: the requests are worth more than their trace.

    file    path to write, or an open text file
    times   adds `times`: {submitted, collected} in seconds since the writer was made
    """

    def __init__(self, file: str | Path | TextIO, times: bool = False):
        try:
            self._file = open(file, "w", encoding="utf-8") if isinstance(file, (str, Path)) else file  # noqa: SIM115
        except OSError as error:
            raise CutawayError(f"cannot write the trace to {file}: {error.strerror}") from None
        self._name = file if isinstance(file, (str, Path)) else getattr(file, "name", "a stream")
        self._names = Names()
        self._times = times
        self._began = time.perf_counter()
        self._preempted: list[int] = []
        self._ended: list[int] = []
        self._gone: list[int] = []

    def between(self, preempted: Iterable[Request], ended: Iterable[int]) -> None:
        """Preempted and aborted since the last line; told apart, because a step may preempt and yet have no row to submit."""
        self._preempted += [r.id for r in preempted]
        self._ended += ended

    def scheduled(self, step: int, budget: int, schedule: Schedule, waiting: Iterable[Request]) -> StepTrace:
        """A step as it is submitted."""
        rows = [
            {"id": r.id, "start": start, "n": n, "drafts": 0, "accepted": 0, "blocks": list(r.table.blocks if r.table else ())}
            for r, start, n in schedule.rows
        ]
        record = {
            "step": step,
            "budget": budget,
            "rows": rows,
            "waiting": [r.id for r in waiting],
            "preempted": self._preempted,
            "admitted": [r.id for r in schedule.admitted],
            "finished": self._ended,
            "copies": [list(pair) for pair in schedule.copies],
            "hits": sum(r.num_cached for r in schedule.admitted),
        }
        gone, self._preempted, self._ended, self._gone = self._gone, [], [], []
        return StepTrace(record, time.perf_counter() - self._began, gone)

    def collected(self, step: StepTrace, ended: Sequence[int], counts: BlockCounts, accepted: Sequence[int]) -> bool:
        """The step has answered: which requests it ended, and the drafts that each row kept. False: it cannot be written,
        nor can any later one."""
        for id in step.gone:
            self._names.requests.pop(id, None)
        record = step.record
        record["finished"] += ended
        record |= {"free": counts.free, "cached": counts.cached, "used": counts.used}
        for row, kept in zip(record["rows"], accepted, strict=True):
            row["accepted"] = kept
        if self._times:
            record["times"] = {"submitted": step.submitted, "collected": time.perf_counter() - self._began}
        self._gone += record["finished"]
        line = json.dumps(self._names.canonical(record), separators=(",", ":"))
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            with suppress(OSError):
                self._file.close()  # now, since it tries once more to write what is left
            line = f"cannot write the trace to {self._name}: {error.strerror}; later steps are not traced"
            with suppress(OSError):
                print(line, file=sys.stderr, flush=True)
            return False
        return True

    def close(self) -> None:
        self._file.close()


def read_trace(path: str | Path) -> Iterator[Record]:
    """The records of a trace file. Raises CutawayError naming the line that is not one."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(line)
                    Names().canonical(record)
                except (ValueError, TypeError, KeyError, AttributeError):
                    raise CutawayError(f"{path}, line {number}: not a step of a trace") from None
                yield record
    except (OSError, UnicodeDecodeError) as error:
        raise CutawayError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or 'not text'}") from None


def diff_traces(a: Iterable[Record], b: Iterable[Record]) -> str | None:
    """The first difference of two traces in one line (step, field, both values), or None. Ids are compared up to renaming,
    `times` not at all."""
    names_a, names_b = Names(), Names()
    for number, (left, right) in enumerate(zip_longest(a, b)):
        if left is None or right is None:
            which = "first" if left is None else "second"
            return f"step {number}: the {which} trace has ended, the other goes on"
        left, right = names_a.canonical(left), names_b.canonical(right)
        for name in dict.fromkeys((*left, *right)):
            if name != "times" and left.get(name) != right.get(name):
                return f"step {left['step']}: " + _explain(name, left.get(name), right.get(name))
    return None


def _explain(name: str, left: Any, right: Any) -> str:
    if name == "rows" and len(left) == len(right):
        for row_a, row_b in zip(left, right, strict=True):
            for key in dict.fromkeys((*row_a, *row_b)):
                if row_a.get(key) != row_b.get(key):
                    return (
                        f"row of request {row_a['id']}: {key} is {row_a.get(key)} in the first, {row_b.get(key)} in the second"
                    )
    if name == "rows":
        left, right = [row["id"] for row in left], [row["id"] for row in right]
        name = "requests in rows"
    return f"{name} is {left} in the first, {right} in the second"
