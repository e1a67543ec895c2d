"""A record of every decision that the scheduler under test takes, each held to what the engine relies on before it takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from course.runner.checking import Lab

from cutaway.core.plan import Limits, Schedule
from cutaway.core.request import Request

Split = Callable[[Sequence[int], int, int], list[int]]


@dataclass
class Decision:
    """One step. running: ids before it, in order. rows: (id, start, n). queue: running and waiting ids after it."""

    running: list[int]
    rows: list[tuple[int, int, int]]
    admitted: list[int]
    preempted: list[int]
    queue: list[int]
    num_running: int
    forgot: list[str]  # preempted requests that lost tokens or kept memory


@dataclass
class Before:
    """What a running request was when a step began."""

    tokens: int
    in_flight: int
    computed: int


class Watched:
    """The scheduler under test: passes every call on, judges what it answers, and keeps it. split None: its own default."""

    def __init__(self, lab: Lab, cache: Any, limits: Limits, split: Split | None):
        self._lab, self._limits, self._given = lab, limits, split
        self._questions = 0  # that `split` was asked, in this step
        self.decisions: list[Decision] = []
        self.back: dict[int, int] = {}  # of each request: tokens found in the cache, and computed with their results back
        self.lost = 0  # computed tokens that preemptions gave up
        self._flights: deque[list[tuple[Request, int]]] = deque()
        self._inner = lab.app.Scheduler(cache, limits, **({} if split is None else {"split": self._split}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _split(self, pending: Sequence[int], budget: int, chunk: int) -> list[int]:
        assert self._given is not None
        self._questions += 1
        return self._given(pending, budget, chunk)

    @property
    def asked_split(self) -> bool:
        """Whether the `split` that was given was put a question, since the last step began."""
        return self._given is None or self._questions > 0

    def schedule(self) -> Schedule:
        running = list(self._inner.running)
        before = {r.id: Before(len(r.tokens), r.in_flight, r.computed) for r in running}
        self._questions = 0
        step = self._inner.schedule()
        self._judge_form(step, before)
        self._judge_requests(step, before)
        forgot = [
            f"request {r.id}: {was.tokens} tokens, then {len(r.tokens)}; computed {r.computed}, blocks {r.table.blocks}"
            f", num_published {r.num_published}"
            for r in step.preempted
            if (was := before[r.id]).tokens != len(r.tokens) or r.computed or r.sent or r.table.blocks or r.num_published
        ]
        self.lost += sum(before[r.id].computed for r in step.preempted)
        self.back.update({r.id: start for r, start, _ in step.rows if r in step.admitted})
        if step.rows:
            self._flights.append([(r, n) for r, _, n in step.rows])
        self.decisions.append(
            Decision(
                [r.id for r in running],
                [(r.id, start, n) for r, start, n in step.rows],
                [r.id for r in step.admitted],
                [r.id for r in step.preempted],
                [r.id for r in (*self._inner.running, *self._inner.waiting)],
                len(self._inner.running),
                forgot,
            )
        )
        return step

    def apply(self, done: Sequence[tuple[Request, list[int]]]) -> list[Request]:
        given = {r.id for r, _ in done}  # without those that were preempted or have ended since
        sent = {r.id: list(r.sent) for r, _ in done}
        for r, n in self._flights.popleft():
            self.back[r.id] += n if r.id in given else 0
        finished = self._inner.apply(done)
        expect = self._lab.expect
        expect(isinstance(finished, list), "apply answers the list of requests that finished", f"it answered {finished!r:.80}")
        for r in self._inner.running:
            expect(r.in_flight >= 0, "`in_flight` goes down by the number of new tokens: a slice of a prompt brings none",
                   f"request {r.id}: in_flight is {r.in_flight}")  # fmt: skip
            expect(len(r.tokens) < r.max_total, "the token that makes `max_total` ends the answer: LENGTH",
                   f"request {r.id} has all of its {r.max_total} tokens, and runs")  # fmt: skip
            if r.id in sent:
                expect(list(r.sent) == sent[r.id][1:], "results come for the oldest step: `sent` is taken from its oldest end",
                       f"request {r.id}: sent was {sent[r.id]}, and is {list(r.sent)}")  # fmt: skip
        for r in finished:
            expect(not r.table.blocks and r not in self._inner.running,
                   "a request that finished leaves `running` and gives its blocks back",
                   f"request {r.id} holds {len(r.table.blocks)} blocks")  # fmt: skip
        return finished

    @property
    def preemptions(self) -> list[int]:
        return [id for d in self.decisions for id in d.preempted]

    def _judge_form(self, step: Schedule, before: dict[int, Before]) -> None:
        """Which requests a step names, and where."""
        expect, limits, now = self._lab.expect, self._limits, f"step {len(self.decisions) + 1}"
        expect(isinstance(step, Schedule), "schedule answers a cutaway.core.plan.Schedule", f"it answered {step!r:.80}")
        for row in step.rows:
            right = len(row) == 3 and isinstance(row[0], Request) and row[2] > 0
            expect(
                right, "rows are (request, first position, number of tokens), without rows of 0 tokens", f"{now}: {told(row)}"
            )
        rows, admitted = [r.id for r, _, _ in step.rows], [r.id for r in step.admitted]
        preempted = [r.id for r in step.preempted]
        for id in rows:
            expect(rows.count(id) == 1, "a request has one row in a step", f"{now}: request {id} is in rows twice")
            expect(id not in preempted,
                   "the victim is the last of `running`; a row that has its tokens already is an older one",
                   f"{now}: request {id} is in rows and in preempted")  # fmt: skip
            expect(id in before or id in admitted, "who enters is in `admitted`, too", f"{now}: request {id} is in rows alone")
        for id in admitted:
            expect(id in rows and id not in before, "`admitted` are those of a step's rows that were not running",
                   f"{now}: request {id} is in admitted, {'and was running' if id in before else 'not in rows'}")  # fmt: skip
        for id in preempted:
            expect(id in before, "preempted is one who was running", f"{now}: request {id} is in preempted, and did not run")
        expect(not (preempted and admitted), "memory was short, and somebody entered in the same step",
               f"{now}: preempted {preempted}, admitted {admitted}")  # fmt: skip
        runs = len(self._inner.running)
        most = max(len(rows), runs)
        expect(most <= limits.rows, "`limits.rows` bounds how many run at once",
               f"{now} has {most} rows, of {limits.rows} allowed")  # fmt: skip
        expect(not rows or self.asked_split,
               "the `split` that was given is not asked: it alone decides how many tokens a row computes",
               f"{now}: tokens for {len(rows)} of the requests, and no question put to it")  # fmt: skip

    def _judge_requests(self, step: Schedule, before: dict[int, Before]) -> None:
        """What the requests of a step, and those that wait, say of themselves after it."""
        expect, now = self._lab.expect, f"step {len(self.decisions) + 1}"
        for r, start, n in step.rows:
            was = before.get(r.id, Before(len(r.tokens), 0, start))
            right = start == was.computed and r.computed == start + n
            expect(right, "a row starts at `computed`, which goes up by n in `schedule`",
                   f"{now}: {told((r, start, n))}; computed was {was.computed}, and is {r.computed}")  # fmt: skip
            expect(not r.table.missing(r.computed), "the table is extended before the row is in the step",
                   f"{now}: request {r.id} has {len(r.table.blocks)} blocks for {r.computed} tokens")  # fmt: skip
            known = was.tokens + was.in_flight
            expect(r.computed <= known, "a row gets more tokens than it has pending: the answers of `split` are for other rows",
                   f"{now}: {told((r, start, n))}, which knows {known} tokens")  # fmt: skip
            expect(r.in_flight <= was.in_flight or r.computed >= known,
                   "`in_flight` goes up where the row computes the last token that it knows: it does not sample before",
                   f"{now}: request {r.id} has computed {r.computed} of {known} tokens, and in_flight is {r.in_flight}",
                   )  # fmt: skip
        for r in self._inner.waiting:
            expect(r in step.preempted or not (r.table.blocks or r.computed),
                   "who waits holds nothing: what `lookup` gave for a vain attempt is released, `computed` is 0",
                   f"{now}: request {r.id} waits with {len(r.table.blocks)} blocks, computed {r.computed}")  # fmt: skip
        for r in (*self._inner.running, *self._inner.waiting):
            sent = f"{len(r.sent)} of its steps are in `sent`" if r.sent else "nothing is sent"
            expect(r.in_flight <= len(r.sent), "whatever goes into `in_flight` and `sent` leaves both: with `apply`, or as the "
                   "request is preempted", f"{now}: request {r.id}: in_flight is {r.in_flight} and {sent}")  # fmt: skip


def told(row: Sequence[Any]) -> str:
    """A row in a line, whatever it is."""
    return "(" + ", ".join(f"request {x.id}" if isinstance(x, Request) else f"{x!r:.40}" for x in row) + ")"
