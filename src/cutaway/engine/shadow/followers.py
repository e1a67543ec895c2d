"""How each part is followed by a shadow: what its call is given, and when two outcomes are the same decision.

A follower stands between one instance (or function) of the engine's and the shadow's own. `prepare` copies and renames the
arguments before the engine's own part has run, and answers the call that the shadow is to make, on a thread of its own;
`compare` raises Differs. Block ids are equal up to renaming: a bijection grows as blocks are handed out.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from cutaway.core.blocks import BlockAllocator, BlockTable
from cutaway.core.errors import MAX_SHOWN, shown
from cutaway.core.prefix_cache import PrefixCache
from cutaway.core.request import Request


class Differs(Exception):
    """(yours, the reference's): two outcomes that are not the same decision, each in words."""


@dataclass(slots=True)
class Call:
    """A call of the engine's: the method or function, positional arguments by the reference's signature, and the others.
    once: indexes of those that were iterators, which are lists here."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    once: tuple[int, ...] = ()


def need_equal(what: str, yours: object, ours: object) -> None:
    """Raises Differs; of two lists it says what follows their common beginning, if they are long."""
    if yours == ours:
        return
    if isinstance(yours, list) and isinstance(ours, list) and len(repr(yours)) + len(repr(ours)) > 2 * MAX_SHOWN:
        same = next((i for i, (a, b) in enumerate(zip(yours, ours, strict=False)) if a != b), min(len(yours), len(ours)))
        what, yours, ours = f"{what} from index {same}", yours[same:], ours[same:]
    raise Differs(f"{what} {shown(yours)}", f"{what} {shown(ours)}")


class Follower:
    """One instance or function of the engine's (`ours`), and of the shadow's module (`theirs`)."""

    theirs: Any

    def __init__(self, module: Any, ours: Any, args: tuple[Any, ...], context: dict[str, Any]):
        """module: the shadow's. args: those that `ours` was made with."""
        self.module, self.ours, self.context = module, ours, context
        self.theirs = self.create(*args)

    def create(self, *args: Any) -> Any:
        """What the shadow's calls go to."""
        return self.module

    def prepare(self, call: Call) -> Callable[[], Any] | None:
        """The shadow's call, or None where this one is not compared."""
        args = [iter(a) if i in call.once else a for i, a in enumerate(self.arguments(call))]
        return lambda: getattr(self.theirs, call.name)(*args)

    def arguments(self, call: Call) -> Sequence[Any]:
        return call.args

    def state(self, thing: Any) -> dict[str, object]:
        """What has to be equal after each call, of either side."""
        return {}

    def compare(self, call: Call, expected: Any, got: Any) -> None:
        """Raises Differs. Either side has answered."""


class Renaming:
    """Blocks of the engine's and the shadow's that are one block to whoever holds them. `held`: how often each of ours is."""

    def __init__(self, pool: int):
        self.pool = pool
        self.theirs: dict[int, int] = {}
        self.ours: dict[int, int] = {}
        self.held: Counter[int] = Counter()

    def of(self, block: int) -> int:
        """-1, which no pool has, for one that nobody was given."""
        return self.theirs.get(block, -1)

    def fresh(self, ours: Sequence[int], theirs: Any) -> None:
        """Blocks that were handed out, in their order. Raises Differs where they are too few, foreign or somebody's."""
        given = [int(b) for b in theirs]
        need_equal("blocks handed out:", len(given), len(ours))
        for a, b in zip(ours, given, strict=True):
            if not 0 < b <= self.pool:
                raise Differs(f"hands out block {b}", f"blocks are 1 to {self.pool}")
            owner = self.ours.get(b)
            if owner is not None and self.held[owner]:
                raise Differs(f"hands out block {b}, which is held", "a block that is free")
            if owner is not None:
                del self.theirs[owner]
            self.ours.pop(self.theirs.get(a, -1), None)
            self.theirs[a], self.ours[b] = b, a
            self.held[a] = 1

    def same(self, ours: int, theirs: Any) -> None:
        if self.of(ours) != theirs:
            whose = "one that it has given away since" if ours not in self.theirs else f"its own {self.theirs[ours]}"
            raise Differs(f"block {theirs}", f"block {ours}, which is {whose}")


class AllocatorFollower(Follower):
    """06: any ids, but as many, of this pool, and nobody else's."""

    def create(self, *args: Any) -> Any:
        self.names = self.context["names"] = Renaming(args[0] - 1)
        return self.module.BlockAllocator(*args)

    def arguments(self, call: Call) -> Sequence[Any]:
        return call.args if call.name != "free" else ([self.names.of(b) for b in call.args[0]],)

    def state(self, thing: Any) -> dict[str, object]:
        return {"num_free": thing.num_free}

    def compare(self, call: Call, expected: Any, got: Any) -> None:
        if call.name == "allocate":
            self.names.fresh(expected, got)
        elif call.name == "free":
            self.names.held.subtract(call.args[0])


class TableFollower(Follower):
    """06: the scheduler writes into `blocks`, so the shadow's are set before each call. What a table says of its slots is
    asked whenever it grows: on the live path backends work them out by themselves."""

    def create(self, *args: Any) -> Any:
        self.size = args[0]
        return self.module.BlockTable(*args)

    def prepare(self, call: Call) -> Callable[[], Any] | None:
        names: Renaming = self.context["names"]
        before = [names.of(b) for b in self.ours.blocks]
        args = call.args if call.name != "extend" else ([names.of(b) for b in call.args[0]],)

        def play() -> Any:
            self.theirs.blocks[:] = before
            answer = getattr(self.theirs, call.name)(*args)
            return answer, list(self.theirs.blocks), self._probe(self.theirs, len(before)) if call.name == "extend" else None

        return play

    def _probe(self, table: Any, first: int) -> list[int]:
        end = len(table.blocks) * self.size
        start = min(max(first * self.size - 1, 0), end)
        slots = [int(s) for s in (*table.slots(start, end), *table.slots(start, max(start, end - 1)))]
        return slots + ([int(table.slot(start)), int(table.slot(end - 1))] if end > start else [])

    def compare(self, call: Call, expected: Any, got: Any) -> None:
        answer, blocks, probe = got
        twin = BlockTable(self.size)
        twin.blocks = [self.context["names"].of(b) for b in self.ours.blocks]
        need_equal("blocks of the table:", blocks, twin.blocks)
        if probe is not None:
            need_equal("slots:", probe, self._probe(twin, len(blocks) - len(call.args[0])))
        if call.name == "missing":
            need_equal("missing:", answer, expected)


class CacheFollower(Follower):
    """09: over an allocator of its own. What is evicted shows in what is found later."""

    def create(self, *args: Any) -> Any:
        pool = self.ours.num_free
        self.names = Renaming(pool)
        return self.module.PrefixCache(BlockAllocator(pool + 1), *args[1:])

    def arguments(self, call: Call) -> Sequence[Any]:
        match call.name:
            case "lookup":
                return (list(call.args[0]),)
            case "publish":
                return self.names.of(call.args[0]), call.args[1]
            case "fork" | "release":
                return ([self.names.of(b) for b in call.args[0]],)
            case "prepare_write":
                return (self.names.of(call.args[0]),)
            case _:
                return call.args

    def state(self, thing: Any) -> dict[str, object]:
        return {name: getattr(thing, name) for name in ("num_free", "num_cached", "num_used")}

    def compare(self, call: Call, expected: Any, got: Any) -> None:
        names, held = self.names, self.names.held
        match call.name:
            case "lookup":
                need_equal("blocks found:", len(got), len(expected))
                for a, b in zip(expected, got, strict=True):
                    names.same(a, b)
                held.update(expected)
            case "allocate":
                names.fresh(expected, got)
            case "publish":
                names.same(expected, got)
                held.update([expected])
                held.subtract([call.args[0]])
            case "fork":
                held.update(call.args[0])
            case "release":
                held.subtract(call.args[0])
            case "prepare_write":
                block, source = got
                need_equal("copies before the write:", source is not None, expected[1] is not None)
                if source is None:
                    names.same(expected[0], block)
                else:
                    names.same(expected[1], source)
                    names.fresh([expected[0]], [block])
                    held.subtract([call.args[0]])
            case _:
                pass


class ChainFollower(Follower):
    """09: any digests, but as many, each over its parent and its tokens: asked for one at a time they are the same, behind
    another parent or with its tokens in another order a block has another."""

    def prepare(self, call: Call) -> Callable[[], Any] | None:
        tokens, size, namespace = list(call.args[0]), call.args[1], call.args[2]

        def play() -> Any:
            chain: Callable[..., list[bytes]] = self.module.chain
            digests, singly, otherwise, parent = list(chain(tokens, size, namespace)), [], [], namespace
            longer = tokens[: len(tokens) // size * size] + tokens[:size]  # the engine often asks for one block
            for start in range(0, len(longer) - size + 1, size):
                block = longer[start : start + size]
                singly += chain(block, size, parent)
                otherwise += chain(block, size, b"another parent")
                if block[::-1] != block:
                    otherwise += chain(block[::-1], size, parent)
                parent = singly[-1]
            return digests, list(chain(longer, size, namespace)), singly, otherwise

        return play

    def compare(self, call: Call, expected: Any, got: Any) -> None:
        digests, whole, singly, otherwise = got
        need_equal("hashes:", len(digests), len(expected))
        if not all(isinstance(d, bytes) for d in digests):
            raise Differs(f"hashes {shown(digests)}", "bytes")
        if whole != singly or whole[: len(digests)] != digests:
            raise Differs("a block that is asked for alone, behind its parent's hash, has another hash", "the same")
        if set(digests) & set(otherwise):
            raise Differs("two blocks with other parents, or other tokens, have one hash", "two")


class SchedulerFollower(Follower):
    """10: with requests and a cache of its own. The order of rows within a step is no decision; that of the queue is."""

    def create(self, *args: Any) -> Any:
        cache, limits, split = args
        self.caches = cache, PrefixCache(BlockAllocator(cache.num_free + 1))
        self.size = limits.block_size
        self.requests: dict[int, tuple[Request, Request]] = {}  # ours, theirs
        return self.module.Scheduler(self.caches[1], limits, split=inspect.unwrap(split))

    def arguments(self, call: Call) -> Sequence[Any]:
        queued = {r.id for r in (*self.ours.running, *self.ours.waiting)}
        self.requests = {id: pair for id, pair in self.requests.items() if id in queued}
        for ours, theirs in self.requests.values():  # what the engine writes between two calls
            theirs.hashes += ours.hashes[len(theirs.hashes) :]
            for name in ("slot", "generation", "num_cached", "kept"):
                setattr(theirs, name, getattr(ours, name))
        if call.name == "add":
            asked: Request = call.args[0]
            self.requests[asked.id] = asked, self._copy(asked)
            return (self.requests[asked.id][1],)
        if call.name == "apply":
            return ([(self.requests[r.id][1], list(tokens)) for r, tokens in call.args[0]],)
        return call.args

    def _copy(self, asked: Request) -> Request:
        copy = Request(
            asked.id, list(asked.tokens), deepcopy(asked.params), asked.stop_ids, list(asked.hashes), asked.num_prompt
        )
        copy.table, copy.arrived = BlockTable(self.size), asked.arrived
        return copy

    def state(self, thing: Any) -> dict[str, object]:
        cache = self.caches[thing is not self.ours]
        return {
            "running": sorted(r.id for r in thing.running),
            "waiting": [r.id for r in thing.waiting],
            "blocks used": cache.num_used,
            "blocks cached": cache.num_cached,
        }

    def compare(self, call: Call, expected: Any, got: Any) -> None:
        if call.name == "schedule":
            for name in ("preempted", "admitted"):
                need_equal(name, [r.id for r in getattr(got, name)], [r.id for r in getattr(expected, name)])
            need_equal("preemptions", *([r.preemptions for r in x.preempted] for x in (got, expected)))
            need_equal("rows (request, start, tokens)", *(sorted((r.id, s, n) for r, s, n in x.rows) for x in (got, expected)))
            need_equal("prompt tokens found", *([r.num_cached for r in x.admitted] for x in (got, expected)))
            self._compare_blocks(expected, got)
        elif call.name == "apply":
            ends = [sorted((r.id, str(r.finish_reason)) for r in finished) for finished in (got, expected)]
            need_equal("finished", *ends)
            for request, _ in call.args[0]:
                theirs = self.requests[request.id][1]
                need_equal(f"tokens of request {request.id}:", theirs.tokens, request.tokens)

    def _compare_blocks(self, expected: Any, got: Any) -> None:
        names: dict[int, int] = {}
        for ours, theirs in self.requests.values():
            a, b = (r.table.blocks if r.table else [] for r in (ours, theirs))
            need_equal(f"blocks of request {ours.id}:", len(b), len(a))
            for x, y in zip(a, b, strict=True):
                if names.setdefault(x, y) != y:
                    raise Differs(f"request {ours.id} does not share block {y}", f"shares it (block {x})")
        if len(set(names.values())) != len(names):
            raise Differs("requests share a block", "they do not")
        need_equal("blocks copied to:", sorted(b for _, b in got.copies), sorted(names.get(b, 0) for _, b in expected.copies))


class SplitFollower(Follower):
    """11."""

    def arguments(self, call: Call) -> Sequence[Any]:
        return list(call.args[0]), *call.args[1:]

    def compare(self, call: Call, expected: Any, got: Any) -> None:
        need_equal("tokens", list(got), list(expected))
