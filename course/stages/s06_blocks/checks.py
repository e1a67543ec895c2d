"""Stage 06: the allocator and the block table. Everything is counted, from the ids that the learner's code answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import chain as joined
from typing import Any

import numpy as np
from course.given.rig import fake_engine, request, run
from course.runner.checking import Lab, check
from course.stages.s06_blocks.helpers import SIZE, clear, drain, few, grow, many, pool_of, refusals

from cutaway.core.request import Output
from cutaway.engine.engine import Engine

WINDOW = 128  # what a contiguous row reserves, tokens
ROWS = 24  # as many of them as the memory of `sequences_that_fit` holds
STEPS = 2000  # of the fuzz


@check(
    gate="= 0",
    unit="times",
    probably="ids are counted from 0: a pool of n blocks has n - 1 to give, 1 to n - 1, for padding writes into block 0",
)
def dummy_never_handed_out(lab: Lab) -> None:
    """block 0 is never handed out"""
    dummies = 0
    for blocks in (1, 2, 7, 64):
        pool = pool_of(lab, blocks)
        lab.equal(pool.num_free, blocks, f"num_free of a new pool of {blocks + 1}, the dummy included")
        for _ in range(20):
            ids = drain(lab, pool)
            dummies += ids.count(0)
            pool.free(ids)
            lab.equal(sorted(i for i in ids if i), list(range(1, blocks + 1)), f"blocks of a pool of {blocks + 1}")
    lab.measure(dummies)


@check(gate="= 0", unit="leaked", probably="the blocks taken before the pool ran dry are not put back: count first, then take")
def all_or_nothing(lab: Lab) -> None:
    """takes all blocks or none"""
    leaked = 0
    for blocks, taken, asked in ((4, 0, 5), (10, 7, 4), (10, 9, 3), (10, 10, 1), (64, 1, 1000)):
        pool = pool_of(lab, blocks)
        held = pool.allocate(taken) if taken else []
        lab.raises(lab.app.OutOfBlocks, lambda pool=pool, asked=asked: pool.allocate(asked),
                   "where too few blocks are free, OutOfBlocks says how many were asked for and how many there are",
                   naming=(asked, blocks - taken))  # fmt: skip
        lab.equal(pool.num_free, blocks - len(held), "num_free after a refusal")
        leaked += blocks - len(held) - len(drain(lab, pool))
    lab.measure(leaked)


@check(
    gate="= 8",
    unit="of 8",
    probably="free puts an id back without asking whether it is there already; two sequences then own one block",
)
def double_free_raises(lab: Lab) -> None:
    """a double free raises, and names it"""
    cases: list[tuple[str, int, Callable[[], object]]] = []
    pools = [pool_of(lab, 20) for _ in range(8)]
    for pool in pools:
        pool.allocate(12)
    for pool, freed in zip(pools[:4], ([5], [1, 2, 3], [12], [9, 4, 7]), strict=True):
        pool.free(freed)
        cases.append((f"free({freed}) and again {freed[-1]}", freed[-1], lambda p=pool, b=freed[-1]: p.free([b])))
    for pool, block in ((pools[4], 13), (pools[5], 20)):
        cases.append((f"free([{block}]), which was never handed out", block, lambda p=pool, b=block: p.free([b])))
    cases.append(("free([6, 6]) in one call", 6, lambda: pools[6].free([6, 6])))
    cases.append(("free((i for i in (8, 8)))", 8, lambda: pools[7].free(i for i in (8, 8))))
    good, others = refusals(lab, cases)
    lab.measure(good, detail=others)
    left = drain(lab, pools[0])
    lab.equal(len(left), len(set(left)), "different blocks among those handed out after a double free")


@check(
    gate="= 8",
    unit="of 8",
    probably="free takes any number: the dummy block, or one past the pool, goes into the free list and out again",
)
def foreign_block_refused(lab: Lab) -> None:
    """a foreign block is refused, and named"""
    pool = pool_of(lab, 8)
    pool.allocate(8)
    cases = [(f"free([{b}])", b, lambda b=b: pool.free([b])) for b in (0, 9, 10, 1000, -1, -8, -9, 2**31)]
    good, others = refusals(lab, cases)
    lab.measure(good, detail=f"the blocks of this pool are 1 to 8. {others}")
    lab.equal(pool.num_free, 0, "num_free after the refusals")


@check(
    gate="= 0",
    unit="of 200",
    probably="a freed block is handed out before lower ones: a stack answers the last one back, a queue the first",
)
def lowest_ids_first(lab: Lab) -> None:
    """the lowest free ids first, together"""
    rng = random.Random(6)
    pool, free = pool_of(lab, 64), set(range(1, 65))
    held: list[int] = []
    wrong, seen = 0, ""
    for _ in range(200):
        n = rng.randint(1, 6)
        if n <= len(free):
            got, want = list(pool.allocate(n)), sorted(free)[:n]
            if got != want:
                wrong, seen = wrong + 1, seen or f"allocate({n}): yours {got}, the lowest free ones are {want}"
            free -= set(got)
            held += got
        rng.shuffle(held)
        cut = rng.randint(0, min(6, len(held)))
        back, held = held[:cut], held[cut:]
        pool.free(back)
        free |= set(back)
    lab.measure(wrong, detail=seen)
    large, small = pool_of(lab, 8192), pool_of(lab, 64)
    lab.ratio(lambda: lend(large), lambda: lend(small), name="a block out and back, of 8,192 against of 64", gate="< 15",
              probably="each call sorts, searches or counts the whole pool; keep a heap and a flag a block")  # fmt: skip


def lend(pool: Any) -> None:
    """What a step asks of the allocator, once."""
    ids = pool.allocate(1)
    if pool.num_free >= 0:
        pool.free(ids)


@check(gate="= 0", unit="steps wrong", probably="a block leaves the free list and is not handed out, or comes back twice")
def free_and_held_are_the_pool(lab: Lab) -> None:
    """num_free + held = pool, after every step"""
    rng = random.Random(7)
    blocks = 40
    pool = pool_of(lab, blocks)
    held: list[int] = []
    good = 0
    for _ in range(STEPS):
        if rng.random() < 0.5:
            n = rng.randint(0, 12)
            try:
                held += pool.allocate(n)
            except lab.app.OutOfBlocks:
                lab.expect(n > blocks - len(held), "OutOfBlocks is raised while there are enough free blocks",
                           f"{n} asked for, {blocks - len(held)} are free")  # fmt: skip
        else:
            rng.shuffle(held)
            n = rng.randint(0, len(held))
            pool.free(held[:n])
            held = held[n:]
        good += len(set(held)) == len(held) and pool.num_free + len(held) == blocks
    pool.free(held)
    lab.equal(sorted(drain(lab, pool)), list(range(1, blocks + 1)), "blocks to be had after all were freed")
    lab.measure(STEPS - good)


@check(gate="= 0", unit="in 40,000", probably="two tables share a block, or slot() forgets to multiply the block by its size")
def slots_never_collide(lab: Lab) -> None:
    """slot numbers never collide"""
    rng = random.Random(8)
    pool = pool_of(lab, 2500)
    tables = [lab.app.BlockTable(SIZE) for _ in range(25)]
    left = 2500
    while left:  # they grow in turn, as sequences that decode side by side do
        n = min(rng.choice((1, 1, 1, 9)), left)
        rng.choice(tables).extend(pool.allocate(n))
        left -= n
    slots = Counter(joined.from_iterable(t.slots(0, len(t.blocks) * SIZE).tolist() for t in tables))
    lab.equal(sum(slots.values()), 40_000, "slots of all tables together")
    lab.expect(all(SIZE <= s < 2501 * SIZE for s in slots), "slots lie outside the pool's blocks 1 to 2500",
               f"they run from {min(slots)} to {max(slots)}")  # fmt: skip
    lab.measure(40_000 - len(slots))


@check(gate="< 16", unit="slots", probably="a sequence whose length is a multiple of 16 holds one more, empty block")
def waste_under_one_block(lab: Lab) -> None:
    """waste stays under one block"""

    def worst(size: int) -> tuple[int, int]:
        """(slots wasted, at which length) of a sequence that grows token by token to 1,000."""
        pool, table, found = pool_of(lab, 1100 // size, size), lab.app.BlockTable(size), (0, 0)
        for length in range(1, 1001):
            grow(lab, pool, table, length, size)
            found = max(found, (len(table.blocks) * size - length, length))
        return found

    for size in (1, 5, 64):
        waste, length = worst(size)
        lab.expect(waste < size, detail=f"blocks of {size}: {many(waste, 'slot')} wasted at {many(length, 'token')}")
    waste, length = worst(SIZE)
    lab.measure(waste, baseline=WINDOW - 1, detail=f"blocks of {SIZE}: {many(waste, 'slot')} wasted at {many(length, 'token')}")


def lengths() -> list[int]:
    """Of 96 sequences under a window of 128: half are exact multiples of the block size, and most others are short, too.
    The guide says so: whoever reads it can work out how many fit."""
    rng = random.Random(9)
    exact = [SIZE, 2 * SIZE, 3 * SIZE] * 16
    drawn = exact + [rng.randint(1, 60) for _ in range(44)] + [rng.randint(64, WINDOW) for _ in range(4)]
    rng.shuffle(drawn)
    return drawn


@check(
    gate="> 3.00",
    unit="x",
    probably="a sequence whose length is a multiple of 16 takes an extra, empty block; look at how you round up",
)
def sequences_that_fit(lab: Lab) -> None:
    """sequences that fit, against rows"""
    drawn = lengths()
    pool = pool_of(lab, ROWS * WINDOW // SIZE)
    fit, extra = 0, 0
    taken: set[int] = set()
    for length in drawn:
        table = lab.app.BlockTable(SIZE)
        try:
            grow(lab, pool, table, length)
        except lab.app.OutOfBlocks:
            break
        slots = set(table.slots(0, length).tolist())
        lab.expect(
            len(slots) == length and not slots & taken, "sequences that fit have to have slots of their own, one a token"
        )
        taken |= slots
        extra += len(table.blocks) * SIZE - length >= SIZE
        fit += 1
    wanted = f"{ROWS * WINDOW:,} slots: {ROWS} rows of {WINDOW}, or {fit} sequences; {extra} of them hold a block too many"
    lab.measure(fit / ROWS, baseline=1.0, detail=wanted)


@check(
    gate="= 0",
    unit="of 4,128",
    probably="16 tokens need 1 block and 17 need 2; blocks that the table has already are not missing",
)
def missing_rounds_up(lab: Lab) -> None:
    """blocks missing: 16 take 1, 17 take 2"""
    wrong, seen = 0, ""
    for size in (1, 4, SIZE):
        for have in (0, 1, 3, 20):
            table = lab.app.BlockTable(size)
            table.extend(list(range(1, have + 1)))
            for tokens in range(344):
                want = max(0, (tokens + size - 1) // size - have)
                if (got := table.missing(tokens)) != want:
                    wrong, seen = (
                        wrong + 1,
                        seen or f"missing({tokens}) with {many(have, 'block')} of {size}: yours {got}, expected {want}",
                    )
            lab.equal(list(table.blocks), list(range(1, have + 1)), "the table after missing(), which only counts")
    lab.measure(wrong, detail=seen)
    clear(lab)


@check(
    gate="= 0",
    unit="wrong",
    probably="a range that begins or ends inside a block is cut at the block",
)
def slots_agree(lab: Lab) -> None:
    """slots() is slot() of each, as int32"""
    wrong, seen = 0, ""
    for size, blocks in ((4, [7, 2, 5, 1]), (SIZE, [9, 3]), (1, [4, 2, 8])):
        table = lab.app.BlockTable(size)
        table.extend(blocks[:1])
        table.extend(blocks[1:])
        slots = [block * size + offset for block in blocks for offset in range(size)]
        lab.equal([table.slot(p) for p in range(len(slots))], slots, f"slot() over the blocks {blocks} of {size}",
                  "a slot is block * block_size + offset within it")  # fmt: skip
        lab.expect(isinstance(table.slot(0), int), "slot() answers a plain int, which NumPy's integers are not",
                   f"slot(0) is a {type(table.slot(0)).__name__}")  # fmt: skip
        for start in range(len(slots) + 1):
            for stop in range(start, len(slots) + 1):
                got = table.slots(start, stop)
                lab.expect(isinstance(got, np.ndarray), "slots() answers a NumPy array", f"{type(got).__name__}")
                lab.expect(got.dtype == np.int32, "the slots have to be int32, as in a step's plan, the empty range's, too",
                           f"slots({start}, {stop}): dtype {got.dtype}, expected int32")  # fmt: skip
                if got.shape != (stop - start,) or got.tolist() != slots[start:stop]:
                    wrong, seen = (
                        wrong + 1,
                        seen or f"slots({start}, {stop}) over {blocks} of {size}: {got.tolist()}, expected {slots[start:stop]}",
                    )
    lab.measure(wrong, detail=seen)
    table.blocks[1] = 6  # of blocks of 1 token
    lab.equal((table.slot(1), table.slots(1, 2).tolist()), (6, [6]), "slot(1) and slots(1, 2) after table.blocks[1] = 6",
              "the engine replaces entries of table.blocks; a copy kept beside it is then wrong")  # fmt: skip


@check(
    gate="= 10",
    unit="of 10",
    probably="a position past the end, or a negative one, is looked up all the same; Python counts -1 from the other end",
)
def past_the_end_raises(lab: Lab) -> None:
    """a position past the end raises"""
    table, empty = lab.app.BlockTable(SIZE), lab.app.BlockTable(SIZE)
    table.extend([3, 8])
    lab.equal((table.slot(31), len(table.slots(31, 32))), (143, 1), "the last position of a table of 2 blocks")
    calls: list[tuple[str, Callable[[], object]]] = []
    for what, which, positions in (("", table, (32, 33, -1, -32, 10**6)), ("empty ", empty, (0,))):
        calls += [(f"{what}slot({p})", lambda t=which, p=p: t.slot(p)) for p in positions]
    for what, which, pair in (("", table, (0, 33)), ("", table, (31, 40)), ("", table, (-1, 4)), ("empty ", empty, (0, 1))):
        calls.append((f"{what}slots{pair}", lambda t=which, pair=pair: t.slots(*pair)))
    good, others = 0, []
    for what, call in calls:
        try:
            others.append(f"{what}: {call()!r}")
        except IndexError:
            good += 1
    lab.measure(good, detail=f"a table of 2 blocks of {SIZE}. {few(others)}")


@check(
    gate="= 24",
    unit="of 24",
    probably="a block was lent twice, lost, or came back too early: some row has read what another one wrote",
)
def engine_in_a_tiny_pool(lab: Lab) -> None:
    """same ids in the engine, in a tiny pool"""
    clear(lab)
    rng = random.Random(10)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 50))] for _ in range(24)]

    def answers(engine: Engine) -> dict[int, list[int]]:
        ids: dict[int, list[int]] = {i: [] for i in range(len(prompts))}

        def keep(_: Engine, outputs: list[Output]) -> None:
            for output in outputs:
                ids[output.id] += output.token_ids

        run(engine, [request(i, p, max_tokens=20 + i) for i, p in enumerate(prompts)], each=keep)
        return ids

    want = answers(fake_engine(num_blocks=257, limits={"rows": 8}))
    tiny = fake_engine(blocks=lab.app, num_blocks=13, limits={"rows": 8})
    got = answers(tiny)
    stats = tiny.stats()
    lab.measure(stats.preemptions, name="preemptions on the way", gate="> 0",
                probably="the pool seems larger than it is: nobody had to give way")  # fmt: skip
    lab.equal((stats.free + stats.cached, stats.used), (12, 1), "blocks (free or cached, used) when all have ended")
    lab.measure(sum(got[i] == want[i] for i in want))
