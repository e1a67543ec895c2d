"""Stage 10: who runs. Nearly all of it in the real engine, on a backend without a model whose answers change if a single block
is wrong, with a record of every decision."""

from __future__ import annotations

import random
import time
from importlib.util import find_spec

from course.given.rig import Preemption, ladder_engine, request, run
from course.runner.checking import Lab, check
from course.stages.s10_scheduler import drills
from course.stages.s10_scheduler.helpers import SIZE, Desk, Mix, crossings, mixes, play, watched

from cutaway.core.errors import CutawayError
from cutaway.core.request import DoesNotFit

CROWD = [(30, 10)] * 4 + [(1000, 8)]  # prompt and most new tokens of the run whose preemption is priced


@check(
    gate="= 100", unit="%", probably="two requests take turns at preempting each other: one has to be older than all and stay"
)
def tiny_pool_finishes(lab: Lab) -> None:
    """requests that end, in 3 to 12 blocks"""
    left = asked = 0
    slowest, stuck, why = 0.0, "", ""
    last = Mix([([*range(12)], 1), ([*range(11)], 2)], 3, {"rows": 4, "budget": 64, "chunk": 64, "block_size": SIZE})
    for mix in (last, *mixes(1, 40)):  # last: as large as the pool, with one token to go
        ran = play(lab, mix)
        left += ran.left
        asked += len(ran.requests)
        if ran.left and not stuck:
            why, numbers = ran.why(mix.usable)
            stuck = f"{ran.left} of {len(ran.requests)} are left after {ran.steps} steps in {mix.usable} blocks; {numbers}"
        slowest = max(slowest, ran.steps / mix.one_by_one())
        whole = all(r.num_output == r.params.max_tokens for r in ran.requests if r.finish_reason)
        lab.expect(whole, "a request ends before its last token, or after it")
    lab.measure(100 * (asked - left) / asked, probably=why, detail=stuck)
    lab.measure(slowest, name="steps, against one request at a time", gate="<= 2", unit="x")


@check(
    gate="= 0",
    unit="preemptions",
    probably="a request enters without room for its next token, and is the next to be thrown out",
)
def preemptions_bounded(lab: Lab) -> None:
    """preemptions beyond block crossings"""
    beyond = tight = roomy = 0
    example = ""
    full = Mix([(list(range(8)), 4), (list(range(20, 24)), 4)], 3, {"rows": 4, "budget": 64, "chunk": 64, "block_size": SIZE})
    for mix in (full, *mixes(2, 24)):  # full: the first one's next token takes the last block, and nobody else may have it
        ran = play(lab, mix)
        counts = [ran.seen.preemptions.count(id) for id in range(len(mix.asked))]
        lab.equal(
            [r.preemptions for r in ran.requests], counts, "request.preemptions", "`request.preemptions` is not counted up"
        )
        bounds = crossings(mix)
        beyond += sum(max(0, count - bound) for count, bound in zip(counts, bounds, strict=True))
        if beyond and not example:
            example = f"preemptions by request {counts}, crossings of it and of older ones {bounds}, in {mix.usable} blocks"
        tight += sum(counts)
        roomy += len(play(lab, mix, usable=200).seen.preemptions)
    lab.measure(
        roomy, name="preemptions with room for all", gate="= 0", probably="a request is preempted where nobody needs its blocks"
    )
    lab.measure(
        tight, name="preemptions in tiny pools", gate="> 0", probably="nobody is ever preempted: who grows, and into what?"
    )
    lab.measure(beyond, detail=example)


@check(
    gate="> 0",
    unit="positions",
    probably="a preempted request forgets tokens, or keeps `computed` without the blocks behind it",
)
def keeps_tokens_recomputes_kv(lab: Lab) -> None:
    """positions computed again, six of 30 + 40"""
    wrong = preempted = lost = again = 0
    for mix in mixes(3, 12):
        for depth in (0, 1):
            mix.depth, mix.prefix_cache = depth, False
            alone, tight = play(lab, mix, usable=200), play(lab, mix)
            forgot = [text for d in tight.seen.decisions for text in d.forgot]
            lab.expect(not forgot, "", forgot[0] if forgot else "")
            lab.expect(not tight.left, *tight.why(mix.usable))
            preempted += len(set(tight.seen.preemptions))
            if depth == 0:
                lost += tight.seen.lost
                again += tight.engine.stats().computed_tokens - alone.engine.stats().computed_tokens
            wrong += sum(a.tokens != b.tokens for a, b in zip(alone.requests, tight.requests, strict=True))
            wrong += sum(tight.outputs.get(r.id) != r.tokens[r.num_prompt :] for r in tight.requests)  # each token sent once
    lab.measure(wrong, name="requests whose ids a preemption changes", gate="= 0", unit="requests")
    lab.measure(preempted, name="requests that were preempted", gate="> 20")
    lab.equal(again, lost, "positions computed again in all, and those that preemptions gave up")
    guide = Mix(
        [([*range(100 * i, 100 * i + 30)], 40) for i in range(6)],
        18,
        {"rows": 8, "budget": 512, "chunk": 512, "block_size": 16},
    )
    ran = play(lab, guide)  # the run that the guide asks to predict
    lab.measure(ran.engine.stats().computed_tokens - 6 * 69, detail=f"preempted: requests {ran.seen.preemptions}")


@check(
    gate="= 0",
    unit="victims",
    probably="the victim is taken from the front of `running`, or by its size: it is the last that was admitted",
)
def last_admitted_gives_way(lab: Lab) -> None:
    """victims who were not the last admitted"""
    wrong, example = 0, ""
    for mix in mixes(4, 30):
        for d in play(lab, mix).seen.decisions:
            tail = d.running[len(d.running) - len(d.preempted) :]
            if d.preempted != tail[::-1]:
                wrong += len(d.preempted)
                example = example or f"running {d.running}, preempted {d.preempted}"
    lab.measure(wrong, detail=example)
    drills.waits_for_own_token(lab)


@check(
    gate="= 0",
    unit="steps",
    probably="a small request passes a large one that waits for room, or a preempted one joins the end of the queue",
)
def head_of_queue_first(lab: Lab) -> None:
    """steps after which the order is broken"""
    broken, example = 0, ""
    for mix in mixes(5, 24):
        for d in play(lab, mix).seen.decisions:
            if d.queue != sorted(d.queue):
                broken += 1
                example = example or f"running, then waiting: {d.queue}; preempted {d.preempted}, admitted {d.admitted}"
    desk = Desk(lab, usable=6)
    for prompt in (12, 16, 2):  # 4 blocks of 6; then one that has to wait, before one that would fit
        desk.add(prompt, 2)
    desk.step()
    lab.equal([r.id for r in desk.scheduler.waiting], [1, 2], "waiting, behind a request that has to wait for room")
    lab.measure(broken, detail=example)


@check(
    gate="= 0",
    unit="steps",
    probably="the budget is counted anew for those who are admitted, after the running rows have used it up",
)
def rows_and_budget(lab: Lab) -> None:
    """steps over the budget, or the chunk"""
    cases = [([2, 3], 4, [2, 0]), ([3, 4, 5], 12, [3, 4, 5]), ([20, 4], 10, [0, 4]), ([0, 1], 1, [0, 1]), ([], 5, [])]
    for pending, budget, granted in cases:
        lab.equal(lab.app.whole_or_nothing(pending, budget, 1), granted, f"whole_or_nothing({pending}, {budget}, 1)",
                  "whole_or_nothing serves rows in order: each gets all its pending tokens, or 0")  # fmt: skip
    over = most = 0
    for mix in mixes(6, 24):
        ran = play(lab, mix)
        bounds = ran.engine.limits
        for d in ran.seen.decisions:
            tokens = [n for _, _, n in d.rows]
            chunk = bounds.budget if mix.whole else bounds.chunk
            over += sum(tokens) > bounds.budget or max(tokens, default=0) > chunk
    drills.zero_is_one_rows_own(lab)
    desk = Desk(lab, usable=60, rows=5, budget=16)
    for _ in range(9):
        desk.add(3, 4)
    desk.add(40, 4)  # more than the budget: only slices bring it through
    for _ in range(40):
        step = desk.step()
        most = max(most, len(step.rows))
    lab.expect(not desk.scheduler.running and not desk.scheduler.waiting,
               "prompts are not put to the `split` that was given: 40 tokens go through a budget of 16 in slices")  # fmt: skip
    lab.measure(
        most, name="most rows at once, of 5 allowed", gate="= 5", probably="rows or budget are left over while requests wait"
    )
    lab.measure(over)


@check(
    gate="= 0",
    unit="requests",
    probably="the last token is counted as memory; it is emitted and never computed, so it needs no place",
)
def refuses_what_never_fits(lab: Lab) -> None:
    """requests wrongly taken or refused"""
    wrong, example, why = 0, "", ""
    for whole in (False, True):
        for prompt in range(1, 30):
            for most in range(1, 30):
                desk = Desk(lab, usable=5, whole=whole, window=24, budget=18)
                longest = prompt + most - 1
                bounds = {
                    "see that `max_total` is over the window": prompt + most > 24,
                    "see that `max_total - 1` tokens need more blocks than the pool has": longest > 20,
                    "ask what `split([max_total - 1], budget, chunk)` answers": whole and longest > 18,
                }
                fits = not any(bounds.values())
                taken = _taken(lab, desk, prompt, most)
                if taken != fits or bool(desk.scheduler.waiting) != fits:
                    wrong += 1
                    if not example and (not taken or sum(bounds.values()) == 1):  # so that there is one cause to name
                        where = f"5 blocks of 4, window 24, {'budget 18' if whole else 'in slices'}"
                        example = f"{prompt} + {most} tokens, {where}: taken is {taken}, expected {fits}"
                        missed = next((bound for bound, over in bounds.items() if over), "")
                        if (
                            longest == 19 and not desk.scheduler.asked_split
                        ):  # over the budget, but in slices; and a place to spare
                            missed = "ask the `split` that it was given"
                        why = f"`add` does not {missed}" if missed else ""
    lab.measure(wrong, probably=why, detail=example)
    desk = Desk(lab, usable=5)
    lab.raises(
        DoesNotFit, lambda: desk.add(20, 5), "the error names what was asked, what it needs and what there is", [20, 6, 5]
    )
    desk.add(17, 4)  # 20 tokens are computed: exactly the pool
    desk.step()
    lab.expect(_taken(lab, desk, 17, 4), "who does not fit now is refused; it is taken if it would fit into an empty pool")
    for _ in range(20):
        desk.step()
    lab.equal(desk.cache.num_free, 5, "free blocks after two requests as large as the pool")


def _taken(lab: Lab, desk: Desk, prompt: int, most: int) -> bool:
    """Whether `add` takes such a request."""
    try:
        desk.add(prompt, most)
        return True
    except DoesNotFit:
        return False
    except (ValueError, CutawayError) as error:
        lab.expect(False, f"`add` raises DoesNotFit, not {type(error).__name__}", f"{prompt} + {most} tokens: {error}")
        return False


@check(gate="= 0", unit="blocks", probably="abort looks only among the running, or only takes the request out of its list")
def abort_frees_everything(lab: Lab) -> None:
    """blocks that an abort leaves behind"""
    kept = 0
    for usable, budget, depth in ((6, 64, 0), (6, 5, 0), (7, 64, 1), (6, 5, 1)):
        for victim in (0, 2, 3, 4):
            for after in (0, 2, 6):
                kept += _abort(lab, usable, budget, depth, victim, after)
    desk = Desk(lab)
    desk.add(5, 3)
    for id in (7, 0, 0):
        desk.scheduler.abort(id)  # an unknown one, one that waits, one that is gone
    lab.expect(not desk.scheduler.waiting, "a waiting request is still there after its abort")
    drills.gives_back_last_block_first(lab)
    lab.measure(kept)


def _abort(lab: Lab, usable: int, budget: int, depth: int, victim: int, after: int) -> int:
    """Blocks that no row holds, straight after `victim` was aborted in a crowded pool; the others still get their ids."""
    ran = watched(lab, usable, {"rows": 4, "budget": budget}, depth=depth, prefix_cache=False)
    room = watched(lab, 100, {"rows": 5}, prefix_cache=False)
    here, there = ([request(i, [i * 10 + j for j in range(5 + i)], max_tokens=7) for i in range(5)] for _ in range(2))
    for r in here:
        ran.engine.add(r)
    for _ in range(after):
        ran.engine.step()
    gone = here[victim]
    if gone.finish_reason is None:
        ran.engine.abort([victim])
        ran.engine.scheduler.abort(victim)  # twice is nothing
    held = {block for r in ran.seen.running if r.table for block in r.table.blocks}
    lab.expect(
        gone.finish_reason is not None and gone not in (*ran.seen.running, *ran.seen.waiting),
        "an aborted request is still queued",
    )
    kept = usable - ran.engine.cache.num_free - len(held)
    ran.finish(usable, 300)
    run(room.engine, there, most_steps=300)
    same = all(a.tokens == b.tokens for a, b in zip(here, there, strict=True) if a is not gone)
    lab.expect(same, "an abort changes the ids of others: it took or freed what was not the request's own")
    return kept + usable - ran.engine.cache.num_free


@check(
    gate="= 0",
    unit="blocks",
    probably="blocks are published when they are scheduled: in flight, or aborted, nothing is in them yet",
)
def only_computed_is_published(lab: Lab) -> None:
    """blocks published, and not yet computed"""
    drills.knows_what_the_cache_has(lab)
    early = 0
    for depth, budget in ((0, 64), (0, 6), (1, 64), (1, 6)):
        early += _publishing(lab, depth, budget)
    lab.measure(early)


def _publishing(lab: Lab, depth: int, budget: int) -> int:
    """Blocks published too early while eight requests run; then the same prompts come again and must find all full blocks."""
    ran = watched(lab, 120, {"rows": 4, "budget": budget}, depth=depth, prefix_cache=True)
    publish, early = ran.engine.cache.publish, 0

    def judged(block: int, digest: bytes) -> int:
        nonlocal early
        holders = [
            r for r in (*ran.seen.running, *ran.seen.waiting) if r.table and block in r.table.blocks and digest in r.hashes
        ]
        early += not any((r.hashes.index(digest) + 1) * SIZE <= ran.seen.back[r.id] for r in holders)
        return publish(block, digest)

    vars(ran.engine.cache)["publish"] = judged
    prompts = [[50 * (i // 2) + j for j in range(5 + 3 * (i // 2))] for i in range(8)]  # each twice, in the same step
    found: list[int] = []
    for wave in range(2):
        requests = [request(100 * wave + i, p, max_tokens=6, engine=ran.engine) for i, p in enumerate(prompts)]
        run(ran.engine, requests, most_steps=400)
        found = [r.num_cached for r in requests]
    want = [(len(p) - 1) // SIZE * SIZE for p in prompts]
    lab.equal(found, want, "tokens that the same prompts, sent again, found in the cache",
              "full, computed blocks are not offered; or the lookup leaves no token to compute")  # fmt: skip
    return early


@check(gate="= 0", unit="steps", probably="a row waits for its token to come back before its next one is scheduled")
def in_flight_counts_as_known(lab: Lab) -> None:
    """steps lost to waiting, 2 in flight"""
    desk = Desk(lab, usable=30)
    asked = desk.add(5, 3)
    steps = [desk.scheduler.schedule() for _ in range(4)]
    got = [[(start, n) for _, start, n in step.rows] for step in steps]
    lab.equal(got, [[(0, 5)], [(5, 1)], [(6, 1)], []], "rows of 4 steps of 5 + 3 tokens before any result",
              "what is on its way is not counted as known, or one goes on past `max_total`")  # fmt: skip
    for step in steps[:3]:
        desk.apply(step)
    lab.equal((asked.num_output, desk.cache.num_used), (3, 0), "tokens and used blocks once the three results are back")
    drills.stop_ids_end_an_answer(lab)
    ran = watched(lab, 60, {"rows": 4, "budget": 64}, depth=2, prefix_cache=False)
    requests = [request(i, list(range(i, i + 6)), max_tokens=20) for i in range(3)]
    run(ran.engine, requests, most_steps=200)
    computed = sum(n for d in ran.seen.decisions for _, _, n in d.rows)
    busy = [index for index, d in enumerate(ran.seen.decisions) if d.rows]
    lab.measure(computed - 3 * (6 + 19), name="positions computed past the end", gate="= 0", unit="positions")
    sequence = requests[0].tokens[6:]
    stop = sequence.index(sequence[5])
    ended = request(9, list(range(6)), max_tokens=20, stop_ids=[sequence[5]])
    run(ran.engine, [ended], most_steps=50)
    lab.equal(ended.tokens[6:], sequence[: stop + 1], "ids up to a stop id, with two more steps in flight behind it",
              "a stop id is the last token of the answer; what was sampled after it is dropped")  # fmt: skip
    lab.measure(busy[-1] + 1 - len(busy), detail=f"steps with rows, for 20 tokens: {busy}")


@check(gate="= 0", unit="positions", probably="`request.kept` is not looked at on admission: those tokens count as computed")
def swap_or_recompute(lab: Lab) -> None:
    """positions computed again under swap"""
    drills.believes_kept(lab)
    again = wrong = 0
    for mix in mixes(11, 10):
        mix.prefix_cache = False
        for mix.depth in (0, 1):
            alone, swapped = play(lab, mix, usable=200), play(lab, mix, preemption="swap")
            wrong += sum(a.tokens != b.tokens for a, b in zip(alone.requests, swapped.requests, strict=True))
            if mix.depth == 0:  # with a step in flight, the token that was lost with it is sampled again
                again += swapped.engine.stats().computed_tokens - alone.engine.stats().computed_tokens
    lab.measure(wrong, name="requests whose ids swapping changes", gate="= 0", unit="requests",
                probably="`num_published` counts kept blocks, too: it is what lookup found, and no more")  # fmt: skip
    lab.measure(again)
    if find_spec("torch") is None:
        return  # what follows needs a real model: the price of both, on this machine
    times: dict[str, list[float]] = {"recompute": [], "swap": []}
    repeated = dict.fromkeys(times, 0)
    for preemption in ("swap", "recompute", "swap"):  # the first run of all loads what the others find
        seconds, computed = _priced(lab, preemption)
        times[preemption].append(seconds)
        repeated[preemption] = computed - sum(prompt + most - 1 for prompt, most in CROWD)
    lab.measure(repeated["recompute"], name="positions computed again by recompute", gate="> 0", unit="positions")
    lab.measure(repeated["swap"], name="and by swap, on the ladder model", gate="= 0", unit="positions")
    for preemption, seconds in times.items():
        lab.measure(1000 * min(seconds), name=f"the run under {preemption}", unit="ms")
    lab.measure(min(times["recompute"]) / min(times["swap"]), name="recompute, against swap", unit="x")


def _priced(lab: Lab, preemption: Preemption) -> tuple[float, int]:
    """CPU seconds and positions of a run in which four short answers grow until a request of 1,000 tokens has to make room."""
    engine = ladder_engine(
        num_blocks=73, prefix_cache=False, limits={"rows": 8, "budget": 512}, preemption=preemption, scheduler=lab.app
    )
    rng = random.Random(5)
    requests = [request(i, [rng.randrange(1024) for _ in range(n)], max_tokens=most) for i, (n, most) in enumerate(CROWD)]
    began = time.thread_time()
    run(engine, requests, most_steps=1000)
    return time.thread_time() - began, engine.stats().computed_tokens
