"""The real engine on a backend without a model, around the scheduler under test; or that scheduler alone, on a desk."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from course.given.rig import Preemption, fake_engine, limits_of, request, run
from course.runner.checking import Failed, Lab
from course.stages.s10_scheduler.recorder import Split, Watched

from cutaway.core import prefix_cache
from cutaway.core.blocks import BlockAllocator, BlockTable
from cutaway.core.chunked import split
from cutaway.core.plan import Limits, Schedule
from cutaway.core.request import DoesNotFit, Request
from cutaway.engine.engine import Engine

NOT_REFUSED = "`add` refuses what fits into the empty pool: the last token is emitted, never computed, and needs no place"
TURNS = "two requests take turns at preempting each other: one has to be older than all and stay"
SIZE = 4  # tokens a block: short requests then cross into new blocks often


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

    def finish(self, usable: int, most_steps: int) -> None:
        """Runs to the end whatever is queued."""
        try:
            run(self.engine, [], most_steps=most_steps)
        except RuntimeError as error:
            if "left" not in str(error):
                raise
            why, numbers = self.why(usable)
            raise Failed(why or str(error), numbers) from error

    def why(self, usable: int) -> tuple[str, str]:
        """Why requests are left: what a person has to look for, and the numbers that say so. `usable`: blocks of the pool."""
        held = {block for r in self.seen.running if r.table for block in r.table.blocks}
        lost = usable - self.engine.cache.num_free - len(held)
        if lost > 0:
            return (
                "blocks are not given back: at the end of a request, or the hits of one that could not enter",
                f"blocks held by no running row: {lost} of {usable}",
            )
        if not self.seen.running:
            return (
                "the head of the queue asks for room past `max_total - 1` tokens, or for more than `split` can give it",
                f"{len(self.seen.waiting)} wait, nobody runs, and all {usable} blocks are free",
            )
        late = sum(len(d.preempted) for d in self.seen.decisions[-100:])
        if not late:
            return (
                "a row without room waits for somebody else to end, and nobody is preempted for it",
                f"running {[r.id for r in self.seen.running]}, no preemption in the last 100 steps",
            )
        if not self.seen.decisions[-1].rows:
            return (
                "a step has no rows, and no result is on its way: of those who run, somebody has to come on",
                f"running {[r.id for r in self.seen.running]}, waiting {[r.id for r in self.seen.waiting]}",
            )
        return TURNS, f"{len(self.seen.preemptions)} preemptions, {late} of them in the last 100 steps"


def watched(lab: Lab, usable: int, limits: dict[str, int], *, whole: bool = False, **given: Any) -> Ran:
    """An engine whose scheduler is the one under test, with `usable` blocks of 4 tokens unless the limits say otherwise."""
    made: list[Watched] = []

    def build(cache: Any, limits: Limits, split: Split) -> Watched:
        made.append(Watched(lab, cache, limits, None if whole else split))
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
    except DoesNotFit as error:  # all of them fit
        queued = {r.id for r in ran.seen.waiting}
        longest = next(r.max_total for r in ran.requests if r.id not in queued) - 1
        sliced = longest > mix.limits["budget"] and longest < (usable or mix.usable) * SIZE  # so it cannot be the last token
        why = "`add` does not ask the `split` that it was given" if sliced and not ran.seen.asked_split else NOT_REFUSED
        raise Failed(why, str(error)) from error
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
    """The scheduler without an engine: a cache, limits, and steps that a check takes one at a time. share: its `split`;
    with `whole` it gets none."""

    def __init__(
        self, lab: Lab, usable: int = 8, publish: bool = False, whole: bool = False, share: Split = split, **limits: int
    ):
        self.cache = prefix_cache.PrefixCache(BlockAllocator(usable + 1, SIZE), publish)
        self.limits = limits_of(usable + 1, **{"rows": 4, "budget": 64, "window": 1000, "block_size": SIZE, **limits})
        self.released: list[int] = []  # blocks, in the order in which they were given back
        self._give_back = self.cache.release
        vars(self.cache)["release"] = self._release
        self.scheduler = Watched(lab, self.cache, self.limits, None if whole else share)
        self._ids = iter(range(1000))

    def _release(self, ids: Iterable[int]) -> None:
        given = list(ids)
        self._give_back(given)
        self.released += given

    def request(self, prompt: int, most: int, *, first: int | None = None, stop_ids: Iterable[int] = ()) -> Request:
        """Its prompt counts up from `first`; without it, no other request begins like it."""
        id = next(self._ids)
        first = 100 * (id + 1) if first is None else first
        made = request(id, list(range(first, first + prompt)), max_tokens=most, stop_ids=stop_ids)
        made.table = BlockTable(SIZE)
        made.hashes = prefix_cache.chain(made.tokens, SIZE)
        return made

    def add(self, prompt: int, most: int, *, first: int | None = None, stop_ids: Iterable[int] = ()) -> Request:
        made = self.request(prompt, most, first=first, stop_ids=stop_ids)
        self.scheduler.add(made)
        return made

    def apply(self, step: Schedule, token: int = 7) -> list[Request]:
        """The step's results: every row that samples gets this token."""
        live: Iterable[tuple[Request, int, int]] = [row for row in step.rows if row[0] in self.scheduler.running]
        return self.scheduler.apply([(r, [token] if start + n >= len(r.tokens) else []) for r, start, n in live])

    def step(self) -> Schedule:
        step = self.scheduler.schedule()
        if step.rows:
            self.apply(step)
        return step
