"""Who runs in the next step, and with which memory (stage 10).

A request *catches up*: of its known tokens (in-flight ones included) some are computed; the rest is pending. Prefill, a slice
of it, decode and recomputation after a preemption are one thing with other numbers (vLLM V1). `computed` advances when a step
is scheduled, so that steps can be scheduled before earlier ones have answered; `apply` brings what came of them. Running rows
come first, then the head of the queue. When memory runs out, the row admitted last gives its blocks back and waits at the
head of the queue with its tokens. Keys and values that the engine has kept for it (`kept`) it does not compute again.

Invariants: running, then waiting, is the order of arrival, so the oldest request is never preempted for another, and each in
turn becomes the oldest: all finish. A row is preempted only where it or an older one crosses into a new block, so at most as
often as they do. A request enters with room for all that it knows and one token more. No step is over budget. Known tokens
never exceed what was asked for. Aborted, finished and waiting requests hold no block.

Tickets, generations and slots are the engine's: it drops the rows of a result whose request was preempted or has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from cutaway.core.plan import Limits, Schedule
from cutaway.core.request import DoesNotFit, FinishReason, Request, Table

Split = Callable[[Sequence[int], int, int], list[int]]  # (pending a row, budget, chunk) -> tokens a row


class Cache(Protocol):
    """What is asked of `prefix_cache.PrefixCache`."""

    @property
    def num_free(self) -> int: ...
    @property
    def num_used(self) -> int: ...
    def lookup(self, hashes: Sequence[bytes]) -> list[int]: ...
    def allocate(self, n: int) -> list[int]: ...
    def publish(self, block: int, digest: bytes) -> int: ...
    def release(self, ids: Iterable[int]) -> None: ...
    def prepare_write(self, block: int) -> tuple[int, int | None]: ...
    def check(self) -> None: ...


def whole_or_nothing(pending: Sequence[int], budget: int, chunk: int) -> list[int]:
    """Tokens for each row: all that it has pending, or none where the budget no longer holds it. `chunk` is not used."""
    granted: list[int] = []
    for tokens in pending:
        granted.append(tokens if tokens <= budget else 0)
        budget -= granted[-1]
    return granted


class Scheduler:
    """Policy alone. `waiting` and `running` are in the order of arrival.

    cache    the only way to blocks; must be all free now
    limits   rows, budget, chunk, window, block_size
    """

    def __init__(self, cache: Cache, limits: Limits, split: Split = whole_or_nothing):
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._cache = cache
        self._limits = limits
        self._split = split
        self._pool = cache.num_free

    def add(self, request: Request) -> None:
        """Queues a request, which has its table. Raises DoesNotFit, with the figures, if it could never run to its end."""
        limits, longest = self._limits, request.max_total - 1  # the last token is emitted, never computed
        blocks = -(-longest // limits.block_size)
        asked = f"{request.num_prompt} prompt tokens and {request.params.max_tokens} to generate"
        if request.max_total > limits.window or blocks > self._pool:
            have = f"the pool has {self._pool} and the window {limits.window} tokens"
            raise DoesNotFit(f"{asked} need {blocks} blocks of {limits.block_size} tokens; {have}")
        if not self._split([longest], limits.budget, limits.chunk)[0]:
            raise DoesNotFit(f"{asked}: up to {longest} tokens in one step, more than its budget of {limits.budget}")
        self.waiting.append(request)

    def abort(self, id: int) -> None:
        """Forgets a request in any state; its blocks are free at once. An unknown id is nothing."""
        for queue in (self.running, self.waiting):
            for request in queue:
                if request.id == id:
                    queue.remove(request)
                    self._let_go(request)
                    return

    def schedule(self) -> Schedule:
        """Decides a step and counts it as computed. Empty where every row waits for tokens in flight."""
        step, left = Schedule(), self._limits.budget
        pending = [r.pending if r.known < r.max_total else 0 for r in self.running]
        for index, tokens in enumerate(self._split(pending, left, self._limits.chunk)):
            if index == len(self.running):  # those behind were preempted
                break
            if tokens and not self._make_room(self.running[index], tokens, step):
                return step  # nobody enters where memory was short
            if tokens:
                self._run(self.running[index], tokens, step)
                left -= tokens
        while not step.preempted and self.waiting and left > 0 and len(self.running) < self._limits.rows:
            tokens = self._admit(self.waiting[0], left, step)
            if not tokens:
                break  # first come, first served: nobody passes the head of the queue
            left -= tokens
        return step

    def apply(self, done: Sequence[tuple[Request, list[int]]]) -> list[Request]:
        """Takes the oldest step's results: (request, new tokens), without stale rows. Answers the requests that finished."""
        finished: list[Request] = []
        for request, tokens in done:
            request.sent.popleft()
            request.in_flight -= len(tokens)
            for token in tokens:
                request.tokens.append(token)
                if token in request.stop_ids:
                    request.finish_reason = FinishReason.STOP
                elif len(request.tokens) == request.max_total:
                    request.finish_reason = FinishReason.LENGTH
                if request.finish_reason:
                    break
            self._publish(request)
            if request.finish_reason:
                self.running.remove(request)
                self._let_go(request)
                finished.append(request)
        return finished

    def check(self) -> None:
        """Asserts the invariants of this file, and the cache's."""
        self._cache.check()
        held = {block for r in self.running for block in _table(r).blocks}
        assert len(held) == self._cache.num_used, f"tables hold {len(held)} blocks, the cache says {self._cache.num_used}"
        assert len(self.running) <= self._limits.rows, "more rows run than there are"
        for r in self.running:
            assert 0 < r.computed <= r.known <= r.max_total, f"request {r.id}: computed {r.computed}, known {r.known}"
            assert r.in_flight >= 0 and sum(r.sent) <= r.computed, f"request {r.id}: {r.in_flight} in flight, sent {r.sent}"
            assert not _table(r).missing(r.computed), f"request {r.id}: its table is too short for {r.computed} tokens"
        for r in self.waiting:
            assert not (_table(r).blocks or r.computed or r.in_flight or r.sent), f"request {r.id} waits with memory"

    def _make_room(self, request: Request, tokens: int, step: Schedule) -> bool:
        """Preempts from the end until the row's next tokens fit; False where that leaves the row itself to go, or to wait."""
        missing = _table(request).missing(request.computed + tokens)
        # a block more where `_run` has to copy one before the row writes; looked for only where that decides
        while missing > self._cache.num_free or (missing == self._cache.num_free and self._shares(request)):
            if self.running[-1] is request and request.in_flight:
                return False  # waits for its own tokens: preempted now it would lose them, and come back no further
            victim = self.running.pop()
            self._let_go(victim)
            victim.preemptions += 1
            self.waiting.appendleft(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _shares(self, request: Request) -> bool:
        """Whether the block that the row writes next is in another row's table, too."""
        index = request.computed // self._limits.block_size
        ours = _table(request).blocks[index : index + 1]
        return bool(ours) and any(_table(r).blocks[index : index + 1] == ours for r in self.running if r is not request)

    def _run(self, request: Request, tokens: int, step: Schedule) -> None:
        table, start = _table(request), request.computed
        index, inside = divmod(start, self._limits.block_size)
        if inside:  # only a block that is written in part can be shared and still be written to
            block, source = self._cache.prepare_write(table.blocks[index])
            if source is not None:
                table.blocks[index] = block
                step.copies.append((source, block))
        if missing := table.missing(start + tokens):
            table.extend(self._cache.allocate(missing))
        if start + tokens == request.known:
            request.in_flight += 1  # the row samples
        request.computed += tokens
        request.sent.append(tokens)
        step.rows.append((request, start, tokens))

    def _admit(self, request: Request, budget: int, step: Schedule) -> int:
        """Moves the head of the queue into the step if it and one token more fit. Answers its tokens; 0: it has to wait."""
        table, size = _table(request), self._limits.block_size
        hits = self._cache.lookup(request.hashes[: (request.known - 1) // size])  # one token is left to compute
        table.extend(hits)
        request.computed = max(len(hits) * size, min(request.kept, request.known - 1))
        tokens = self._split([request.pending], budget, self._limits.chunk)[0]
        missing = table.missing(min(request.known + 1, request.max_total - 1))
        if not tokens or missing > self._cache.num_free:
            self._let_go(request)
            return 0
        self.running.append(self.waiting.popleft())
        step.admitted.append(request)
        table.extend(self._cache.allocate(missing))
        request.num_cached = min(len(hits) * size, request.num_prompt)
        request.num_published = len(hits)
        self._run(request, tokens, step)
        return tokens

    def _publish(self, request: Request) -> None:
        """Offers the blocks that are full and computed, not merely scheduled, to the cache."""
        table, computed = _table(request), request.computed - sum(request.sent)
        full = min(computed // self._limits.block_size, len(request.hashes))
        for i in range(request.num_published, full):
            table.blocks[i] = self._cache.publish(table.blocks[i], request.hashes[i])
        request.num_published = max(request.num_published, full)

    def _let_go(self, request: Request) -> None:
        """Gives all blocks back, the last first, so that the cache drops the ends of beginnings before their heads."""
        table = _table(request)
        self._cache.release(reversed(table.blocks))
        table.blocks.clear()
        request.computed = request.in_flight = request.num_published = 0
        request.sent.clear()


def _table(request: Request) -> Table:
    assert request.table is not None, f"request {request.id} has no block table"
    return request.table
