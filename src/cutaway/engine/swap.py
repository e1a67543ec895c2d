"""Blocks on the host, for requests that were preempted: `--preemption swap`.

The scheduler decides who gives its blocks back; here they are copied before the next step may write over them, and written
back when the request returns, into whatever blocks it has then. Only what the prefix cache no longer has is written back.
A copy that finds no room is not made: that request recomputes, as all do under `recompute`.

Invariants: `request.kept` is not 0 only while its copy is here; the copies hold at most `room` blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cutaway.core.plan import Backend, Blocks, Schedule
from cutaway.core.request import Request


class Swap:
    """Copies of one engine's blocks.

    backend     whose blocks they are
    block_size  tokens a block
    room        most blocks held
    """

    def __init__(self, backend: Backend, block_size: int, room: int):
        self.swapped_out = self.swapped_in = 0  # blocks since the start
        self._backend = backend
        self._size = block_size
        self._room = room
        self._copies: dict[int, Blocks] = {}

    @property
    def held(self) -> int:
        """Blocks on the host."""
        return sum(len(copy.data) for copy in self._copies.values())

    def keep(self, request: Request, blocks: Sequence[int], computed: int) -> None:
        """Copies what a preempted request had computed, but for its newest token: something is left to sample after."""
        tokens = min(computed, len(request.tokens) - 1)
        count = -(-tokens // self._size)
        self.forget(request)
        if 0 < count <= self._room - self.held:
            self._copies[request.id] = self._backend.export_blocks(blocks[:count])
            request.kept = tokens
            self.swapped_out += count

    def bring_back(self, request: Request, start: int) -> None:
        """Before the step that goes on from position `start`: the kept blocks behind those that the prefix cache had. A
        scheduler that knows nothing of `kept` starts at or before those, and nothing is written."""
        copy = self._copies.get(request.id)
        first, end = request.num_published, -(-min(request.kept, start) // self._size)
        if copy is not None and first < end:
            assert request.table is not None
            self._backend.import_blocks(request.table.blocks[first:end], Blocks(copy.data[first:end]))
            self.swapped_in += end - first
        self.forget(request)

    def step(self, schedule: Schedule, before: Mapping[int, tuple[Sequence[int], int]]) -> None:
        """What a schedule asks for, before it is submitted. before: blocks and computed tokens of each row that ran."""
        for request in schedule.preempted:
            self.keep(request, *before[request.id])
        starts = {request.id: start for request, start, _ in schedule.rows}
        for request in schedule.admitted:
            self.bring_back(request, starts.get(request.id, 0))

    def forget(self, request: Request) -> None:
        """Frees the copy of a request that has ended, or returned. None is nothing."""
        self._copies.pop(request.id, None)
        request.kept = 0
