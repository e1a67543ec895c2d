"""The real engine on a backend without a model, and a record of every decision that the scheduler under test takes in it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from course.given.rig import Preemption, fake_engine, limits_of, request, run
from course.runner.checking import Lab

from cutaway.core import prefix_cache
from cutaway.core.blocks import BlockAllocator, BlockTable
from cutaway.core.chunked import split
from cutaway.core.plan import Limits, Schedule
from cutaway.core.request import Request
from cutaway.engine.engine import Engine

SIZE = 4  # tokens a block: short requests then cross into new blocks often


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


class Watched:
    """The scheduler under test: passes every call on, judges the form of what it answers, and keeps it."""

    def __init__(self, lab: Lab, inner: Any):
        self._lab, self._inner = lab, inner
        self.decisions: list[Decision] = []
        self.back: dict[int, int] = {}  # of each request: tokens found in the cache, and computed with their results back
        self._flights: deque[list[tuple[Request, int]]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def schedule(self) -> Schedule:
        running = list(self._inner.running)
        had = {r.id: len(r.tokens) for r in running}
        step = self._inner.schedule()
        self._lab.expect(isinstance(step, Schedule), "schedule answers a cutaway.core.plan.Schedule", f"it answered {step!r}")
        for row in step.rows:
            right = len(row) == 3 and isinstance(row[0], Request) and row[2] > 0
            self._lab.expect(
                right, "rows are (request, first position, number of tokens), without rows of 0 tokens", f"{row!r}"
            )
        forgot = [
            f"request {r.id}: {had.get(r.id)} tokens, then {len(r.tokens)}; computed {r.computed}, blocks {r.table.blocks}"
            for r in step.preempted
            if len(r.tokens) != had.get(r.id) or r.computed or r.in_flight or r.sent or r.table.blocks
        ]
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
        for r, n in self._flights.popleft():
            self.back[r.id] += n if r.id in given else 0
        finished = self._inner.apply(done)
        self._lab.expect(
            isinstance(finished, list), "apply answers the list of requests that finished", f"it answered {finished!r}"
        )
        return finished

    @property
    def preemptions(self) -> list[int]:
        return [id for d in self.decisions for id in d.preempted]


@dataclass
class Mix:
    """Requests (prompt, most new tokens), each of which would fit the pool alone, and the bounds they run in."""

    asked: list[tuple[list[int], int]]
    usable: int
    limits: dict[str, int]
    depth: int = 0
    prefix_cache: bool = False
    whole: bool = False

    def longest(self) -> int:
        return max(len(prompt) + most for prompt, most in self.asked)

    def one_by_one(self) -> int:
        """Steps that the requests take alone, one after the other."""
        step = min(self.limits["budget"], self.limits["chunk"])
        return sum(-(-len(prompt) // step) + most + self.depth for prompt, most in self.asked)


def mixes(seed: int, n: int, **given: Any) -> Iterator[Mix]:
    """Random mixes in pools of 3 to 12 blocks, much too small for all of their requests at once."""
    rng = random.Random(seed)
    for _ in range(n):
        usable = rng.randint(3, 12)
        asked: list[tuple[list[int], int]] = []
        for _ in range(rng.randint(3, 9)):
            total = rng.randint(2, usable * SIZE + 1)  # the last token is emitted and never computed
            prompt = rng.randint(1, total - 1)
            asked.append(([rng.randrange(1000) for _ in range(prompt)], total - prompt))
        whole = rng.random() < 0.3
        limits = {"rows": rng.randint(1, 6), "budget": 64 if whole else rng.choice([4, 9, 64]), "block_size": SIZE}
        limits["chunk"] = min(limits["budget"], rng.choice([3, 64]))
        yield Mix(asked, usable, limits, rng.randint(0, 1), rng.random() < 0.5, whole, **given)


@dataclass
class Ran:
    engine: Engine
    seen: Watched
    requests: list[Request] = field(default_factory=list)
    left: int = 0  # requests that had not ended at the bound on steps
    outputs: dict[int, list[int]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.seen.decisions)


def watched(lab: Lab, usable: int, limits: dict[str, int], *, whole: bool = False, **given: Any) -> Ran:
    """An engine whose scheduler is the one under test, with `usable` blocks of 4 tokens unless the limits say otherwise."""
    made: list[Watched] = []

    def build(cache: Any, limits: Limits, split: Any) -> Watched:
        inner = lab.app.Scheduler(cache, limits) if whole else lab.app.Scheduler(cache, limits, split=split)
        made.append(Watched(lab, inner))
        return made[-1]

    engine = fake_engine(
        num_blocks=usable + 1,
        limits={"block_size": SIZE, "window": 1000, **limits},
        scheduler=SimpleNamespace(Scheduler=build),
        **given,
    )
    return Ran(engine, made[0])


def play(lab: Lab, mix: Mix, *, usable: int = 0, most_steps: int = 0, preemption: Preemption = "recompute") -> Ran:
    """Runs a mix to its end, or to the bound: four times the steps that its requests take one by one."""
    ran = watched(lab, usable or mix.usable, mix.limits, whole=mix.whole, depth=mix.depth, prefix_cache=mix.prefix_cache,
                  preemption=preemption)  # fmt: skip
    chained = ran.engine if mix.prefix_cache else None
    ran.requests = [request(i, list(prompt), max_tokens=most, engine=chained) for i, (prompt, most) in enumerate(mix.asked)]

    def each(engine: Engine, outputs: Sequence[Any]) -> None:
        for output in outputs:
            ran.outputs.setdefault(output.id, []).extend(output.token_ids)

    try:
        run(ran.engine, ran.requests, most_steps=most_steps or 4 * mix.one_by_one(), each=each)
    except RuntimeError as error:
        if "left" not in str(error):
            raise
    ran.left = sum(r.finish_reason is None for r in ran.requests)
    return ran


def crossings(mix: Mix) -> list[int]:
    """For each request, how often it or one that came before it needs a block that it did not enter with."""
    bounds: list[int] = []
    older = 0
    for prompt, most in mix.asked:
        longest = len(prompt) + most - 1
        older += -(-longest // SIZE) - -(-min(len(prompt) + 1, longest) // SIZE)
        bounds.append(older)
    return bounds


class Desk:
    """The scheduler without an engine: a cache, limits, and steps that a check takes one at a time."""

    def __init__(self, lab: Lab, usable: int = 8, publish: bool = False, whole: bool = False, **limits: int):
        self.cache = prefix_cache.PrefixCache(BlockAllocator(usable + 1, SIZE), publish)
        self.limits = limits_of(usable + 1, **{"rows": 4, "budget": 64, "window": 1000, "block_size": SIZE, **limits})
        self.scheduler = Watched(lab, lab.app.Scheduler(self.cache, self.limits, *(() if whole else (split,))))
        self._ids = iter(range(1000))

    def request(self, prompt: int, most: int) -> Request:
        id = next(self._ids)
        made = request(id, [100 * id + i for i in range(prompt)], max_tokens=most)
        made.table = BlockTable(SIZE)
        made.hashes = prefix_cache.chain(made.tokens, SIZE)
        return made

    def add(self, prompt: int, most: int) -> Request:
        made = self.request(prompt, most)
        self.scheduler.add(made)
        return made

    def apply(self, step: Schedule) -> list[Request]:
        """The step's results: every row that samples gets the token 7."""
        live: Iterable[tuple[Request, int, int]] = [row for row in step.rows if row[0] in self.scheduler.running]
        return self.scheduler.apply([(r, [7] if start + n >= len(r.tokens) else []) for r, start, n in live])

    def step(self) -> Schedule:
        step = self.scheduler.schedule()
        if step.rows:
            self.apply(step)
        return step
