"""Stage 11: a step's token budget, shared out. Time is counted, not taken: a step costs as many units as it computes tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from course.given.rig import fake_engine, request, run
from course.runner.checking import Failed, Lab, check
from course.stages.s11_chunked.mistakes import mistake

from cutaway.core.request import Output, Request
from cutaway.core.scheduler import whole_or_nothing
from cutaway.engine.engine import Engine

LONG = 5000  # tokens of the prompt that arrives beside decodes
ARRIVES = 8  # the step after which it does
WHOLE = SimpleNamespace(split=whole_or_nothing)  # what stage 10 runs with
SECONDS = 10.0  # a check takes a fraction of one; a loop that never ends is told soon


def mixes(seed: int, n: int = 600) -> Iterator[tuple[list[int], int, int]]:
    """Rows, a budget and a chunk: decodes, prompts and rows that wait for a token in flight, in any order."""
    rng = random.Random(seed)
    for _ in range(n):
        pending = [rng.choice([0, 1, 1, rng.randint(2, 300)]) for _ in range(rng.randint(0, 12))]
        yield pending, rng.randint(0, 200), rng.randint(1, 200)


def asked(lab: Lab, pending: list[int], budget: int, chunk: int) -> list[int]:
    """The learner's answer, held to its shape: one whole number a row, and the question left as it was."""
    given = list(pending)
    granted = lab.app.split(given, budget, chunk)
    what = f"split({pending}, {budget}, {chunk})"
    lab.expect(isinstance(granted, list), "split answers something else than a list", f"{what}: {granted!r}")
    lab.expect(all(type(n) is int for n in granted), "split answers something else than whole numbers", f"{what}: {granted}")
    lab.equal(len(granted), len(pending), f"rows of {what}", "the answer has to keep every row in its place, those with 0 too")
    lab.equal(given, pending, "`pending` after the call", "split changes the list that it was given")
    return granted


def ends(engine: Engine, requests: list[Request], most_steps: int, each: Callable[[Engine, list[Output]], None],
         chunked: object) -> None:  # fmt: skip
    """Runs the requests to their end. Where that fails, `split` is asked why, in small questions."""
    try:
        run(engine, requests, most_steps=most_steps, each=each)
    except Exception as error:  # the engine's, which says nothing to who wrote `split`
        if why := mistake(chunked.split):
            raise Failed(why, f"the engine says: {error}") from error
        raise


@dataclass
class Seen:
    """What a run showed. costs: tokens of each step. slices: of the long prompt. gaps: of each decoding request, the units
    between its tokens. mixed: slices beside which every decoding request got its token. waiting: steps with prompt left."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    costs: list[int] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    mixed: int = 0
    prompt_left: list[bool] = field(default_factory=list)

    @property
    def worst(self) -> int:
        return max(self.gaps)


def beside_decodes(chunked: object, budget: int, chunk: int, decodes: int = 4, answer: int = 40) -> Seen:
    """Four requests decode; then a prompt of 5,000 tokens arrives. No prefix cache: every token is computed."""
    engine = fake_engine(
        num_blocks=401, prefix_cache=False, limits={"budget": budget, "chunk": chunk, "rows": 8}, chunked=chunked
    )
    rng = random.Random(11)
    short = [request(i, [rng.randrange(1000) for _ in range(9 + i)], max_tokens=answer) for i in range(decodes)]
    long = request(99, [rng.randrange(1000) for _ in range(LONG)], max_tokens=4)
    seen, last, before = Seen(), dict.fromkeys(range(decodes), 0), {"computed": 0, "long": 0, "clock": 0}

    def each(engine: Engine, outputs: list[Output]) -> None:
        total = engine.stats().computed_tokens
        seen.costs.append(total - before["computed"])
        before["computed"], clock = total, total
        got = [o.id for o in outputs if o.id in last and o.token_ids]
        for id in got:
            if last[id]:
                seen.gaps.append(clock - last[id])
            last[id] = clock
        prefilled = min(long.computed, LONG) if not long.num_output else LONG
        if prefilled > before["long"]:
            seen.slices.append(prefilled - before["long"])
            seen.mixed += len(got) == decodes
        before["long"] = prefilled
        if len(seen.costs) == ARRIVES:
            engine.add(long)
        seen.prompt_left.append(len(seen.costs) >= ARRIVES and prefilled < LONG)

    ends(engine, short, 1000, each, chunked)
    seen.ids = {r.id: r.tokens[r.num_prompt :] for r in (*short, long)}
    return seen


@check(
    gate="= 0",
    seconds=SECONDS,
    unit="steps",
    probably="the slices are cut from the whole budget, not from what the decodes have left of it",
)
def never_over_budget(lab: Lab) -> None:
    """steps over budget, of 600"""
    over = 0
    for pending, budget, chunk in mixes(1):
        granted = asked(lab, pending, budget, chunk)
        if sum(granted) > budget:
            over += 1
            worst = f"split({pending}, {budget}, {chunk}) grants {granted}, {sum(granted)} in all"
    lab.measure(over, probably=mistake(lab.app.split) if over else "", detail=worst if over else "")


@check(
    gate="= 0",
    unit="rows",
    probably="a row gets a whole chunk where it has less pending: the grant is the least of pending, chunk and budget",
    seconds=SECONDS,
)
def no_row_over_its_bounds(lab: Lab) -> None:
    """rows past their pending or the chunk"""
    lab.equal(asked(lab, [], 10, 4), [], "split([], 10, 4)")
    over, example = 0, ""
    for pending, budget, chunk in mixes(2):
        granted = asked(lab, pending, budget, chunk)
        wrong = [row for row, n in enumerate(granted) if not 0 <= n <= min(pending[row], chunk)]
        over += len(wrong)
        if wrong and not example:
            example = f"row {wrong[0]} of split({pending}, {budget}, {chunk}) gets {granted[wrong[0]]}"
    lab.measure(over, probably=mistake(lab.app.split) if over else "", detail=example)


@check(
    gate="= 0",
    unit="rows",
    probably="rows are served in the order in which they stand, so a prompt before a decode takes its token",
    seconds=SECONDS,
)
def decodes_first(lab: Lab) -> None:
    """rows served out of turn"""
    out, example = 0, ""
    for pending, budget, chunk in ([100, 1, 1], 10, 100), *mixes(3):
        granted = asked(lab, pending, budget, chunk)
        turns = sorted(range(len(pending)), key=lambda row: pending[row] != 1)  # decodes, then the others, each in order
        short = next((i for i, row in enumerate(turns) if granted[row] < min(pending[row], chunk)), len(turns))
        early = sum(granted[row] > 0 for row in turns[short + 1 :])
        out += early
        if early and not example:
            example = f"split({pending}, {budget}, {chunk}) grants {granted}"
    lab.measure(out, probably=mistake(lab.app.split) if out else "", detail=example)
    lab.equal(asked(lab, [100, 1, 1], 10, 100), [8, 1, 1], "split([100, 1, 1], 10, 100)", mistake(lab.app.split))


@check(gate="< 0.20", unit="x", seconds=SECONDS,
       probably="a long prompt still goes through whole, or in steps that are far over the budget")  # fmt: skip
def worst_gap(lab: Lab) -> None:
    """worst gap, against whole prompts"""
    whole = beside_decodes(WHOLE, 8192, 8192)
    ours = beside_decodes(lab.app, 512, 512)
    lab.measure(whole.worst, name="worst gap with whole prompts", unit="tokens")
    why = mistake(lab.app.split)
    lab.measure(ours.worst, name="worst gap in slices", unit="tokens", gate="<= 512", probably=why)
    lab.measure(ours.worst / whole.worst, baseline=1.0, against="whole prompts")


@check(
    gate="<= 0.30",
    unit="x",
    probably="the slice has a size of its own, or that of the chunk: it is the budget that bounds a step",
    seconds=SECONDS,
)
def smaller_budget_smaller_gap(lab: Lab) -> None:
    """worst gap of budget 128, against 512"""
    gaps = {budget: beside_decodes(lab.app, budget, 2048, answer=60).worst for budget in (512, 256, 128)}
    lab.expect(gaps[512] > gaps[256] > gaps[128], mistake(lab.app.split), f"budget -> worst gap: {gaps}")
    lab.measure(gaps[128] / gaps[512], detail=f"budget -> worst gap: {gaps}")


@check(
    gate="= 10",
    seconds=SECONDS,
    unit="steps",
    probably="the prompt has steps to itself: its slices must ride with the decodes, in one step",
)
def mixed_steps(lab: Lab) -> None:
    """5,000 tokens in 508s, beside 4 decodes"""
    seen, why = beside_decodes(lab.app, 512, 512), mistake(lab.app.split)
    lab.equal(sum(seen.slices), LONG, "tokens of the long prompt that were computed")
    lab.measure(len(seen.slices), name="slices of the prompt", gate=f"= {-(-LONG // 508)}", detail=f"slices: {seen.slices}",
                probably=why or "a slice is smaller than what decodes leave of the budget, or the chunk allows")  # fmt: skip
    lab.measure(seen.mixed, probably=why, detail=f"slices: {seen.slices}")


@check(
    gate=">= 0.99",
    unit="x",
    probably="budget is left over while a prompt waits: shared out in equal parts, or to one prompt a step",
    seconds=SECONDS,
)
def throughput_kept(lab: Lab) -> None:
    """how full steps are while prompt is left"""
    idle = 0
    for pending, budget, chunk in mixes(4):
        room = min(budget, sum(min(tokens, chunk) for tokens in pending))
        idle += max(0, room - sum(asked(lab, pending, budget, chunk)))
    why = mistake(lab.app.split)
    lab.measure(idle, name="tokens of budget idle in 600 mixes", gate="= 0", unit="tokens", probably=why)
    whole, ours = beside_decodes(WHOLE, 8192, 8192), beside_decodes(lab.app, 512, 512)
    lab.measure(
        sum(ours.costs) / sum(whole.costs), name="tokens computed, against whole prompts", gate="= 1", unit="x", probably=why
    )
    lab.measure(len(ours.costs) / len(whole.costs), name="steps, against whole prompts", gate="<= 1.05", unit="x", probably=why)
    busy = [cost for cost, left in zip(ours.costs[1:], ours.prompt_left, strict=False) if left][:-1]  # the last one is a rest
    lab.measure(sum(busy) / (512 * len(busy)), probably=why, detail=f"steps of {busy} tokens")


@check(
    gate="= 0",
    seconds=SECONDS,
    unit="requests",
    probably="a row with nothing pending is given a token: its newest one is still in flight",
)
def same_ids_in_the_engine(lab: Lab) -> None:
    """requests whose ids differ, of 72"""
    differ = more = 0
    for depth, budget, chunk in ((0, 24, 24), (1, 24, 10), (1, 7, 7)):
        (want, fewest), (got, computed) = answers(WHOLE, depth, 256, 256), answers(lab.app, depth, budget, chunk)
        differ += sum(got[id] != want[id] for id in want)
        more += computed - fewest
    why = mistake(lab.app.split)
    lab.measure(differ, probably=why)
    lab.measure(more, name="positions computed, beyond those of whole prompts", gate="= 0", unit="positions", probably=why)


def answers(part: object, depth: int, budget: int, chunk: int) -> tuple[dict[int, list[int]], int]:
    """The ids of 24 requests with ragged prompts and the positions computed for them, in the real engine, whose own
    invariants hold after every step."""
    engine = fake_engine(num_blocks=120, depth=depth, limits={"budget": budget, "chunk": chunk, "rows": 6}, chunked=part)
    rng = random.Random(12)
    requests: list[Request] = []
    for id in range(24):
        tokens = [rng.randrange(1000) for _ in range(rng.choice([1, 3, 16, 17, rng.randint(20, 90)]))]
        requests.append(request(id, tokens, max_tokens=rng.randint(1, 12), engine=engine))
    verify: Callable[[Engine, list[Output]], None] = lambda engine, _: engine.check()  # noqa: E731
    ends(engine, requests, 2000, verify, part)
    return {r.id: r.tokens[r.num_prompt :] for r in requests}, engine.stats().computed_tokens
