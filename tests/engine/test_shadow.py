"""Shadow mode: what differs is found and said, what is merely different is not, and what is served stays the same."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs import ask, collect, fake, run, running, until

from cutaway.backends.fake import FakeBackend
from cutaway.cli.options import config_from
from cutaway.core.errors import CutawayError
from cutaway.core.plan import Limits
from cutaway.core.prefix_cache import chain
from cutaway.core.request import Request, SamplingParams
from cutaway.engine.channel import ProcessChannel
from cutaway.engine.engine import Engine
from cutaway.engine.parts import PARTS, Parts, load_module
from cutaway.engine.shadow import FOLLOWERS, Shadow, parts_of

Answers = list[tuple[int, list[int]]]


def edited(part: str, folder: Path, find: str = "", replace: str = "", more: str = "") -> str:
    """The part's own file with one place changed, or with lines at its end."""
    text = Path(load_module(PARTS[part].default).__file__ or "").read_text()
    assert not find or text.count(find) == 1, f"{find} is there {text.count(find)} times"
    file = folder / f"{part}.py"
    file.write_text((text.replace(find, replace) if find else text) + more)
    return str(file)


def serve(shadows: dict[str, Shadow], *, blocks: int = 20, depth: int = 0) -> Answers:
    """40 requests that share beginnings, in a pool so small that some are preempted and cached blocks are evicted."""
    parts = Parts(shadows=shadows)
    for shadow in shadows.values():
        shadow.step = lambda: parts.step
    limits = Limits(rows=4, budget=24, chunk=16, window=60, block_size=4)
    engine = Engine(FakeBackend(blocks, 4, vocabulary=50, delay=depth), parts, limits, depth=depth)
    draw, answers, steps, tokens = random.Random(1), Answers(), 0, list[int]()
    for id in range(40):
        tokens = tokens[:] if id % 5 == 4 else [draw.randrange(3) for _ in range(draw.randrange(2, 30))]
        params = SamplingParams(temperature=0, max_tokens=draw.randrange(1, 20))
        engine.add(Request(id, tokens, params, frozenset({7}), chain(tokens, 4)))
    while engine.has_work:
        answers += [(o.id, o.token_ids) for o in engine.step()]
        steps += 1
        if steps == 9:
            engine.abort([engine.scheduler.running[-1].id, 12])
        engine.check()
    assert engine.stats().preemptions > 5
    return answers


@pytest.fixture(scope="module")
def alone() -> Answers:
    return serve({})


SERVED = ("blocks", "prefix_cache", "scheduler", "chunked")  # what an engine on the fake backend calls

DIFFERENT = {  # what is wrong -> part, edit, what is said of it
    "a scheduler that preempts the oldest row": (
        "scheduler", "victim = self.running.pop()", "victim = self.running.pop(0)",
        r"step \d+, call \d+, Scheduler.schedule: yours: preempted \[\d+\]; the reference: preempted \[\d+\]"),
    "a scheduler that forgets to publish": (
        "scheduler", "table.blocks[i] = self._cache.publish(table.blocks[i], request.hashes[i])", "pass",
        "Scheduler.apply: yours: blocks cached 0; the reference: blocks cached"),
    "a scheduler that keeps the blocks of who leaves": (
        "scheduler", "self._cache.release(reversed(table.blocks))", "pass", "yours: blocks used"),
    "a scheduler that lets others pass the head of the queue": (
        "scheduler", "self._admit(self.waiting[0]", "self.waiting.rotate(-1) or self._admit(self.waiting[0]",
        r"Scheduler.schedule: yours: admitted \[1, .*the reference: admitted \[0, "),
    "a scheduler that counts its answer's token twice": (
        "scheduler", "request.tokens.append(token)", "request.tokens += [token, token]", "Scheduler.apply: yours: "),
    "a cache that evicts the most recently used": (
        "prefix_cache", "popitem(last=False)", "popitem(last=True)", "PrefixCache.lookup: yours: blocks found: "),
    "a cache that leaks a reference": (
        "prefix_cache", "self._refs[block] = self._refs.get(block, 0) + 1", "self._refs[block] = self._refs.get(block, 0) + 2",
        "yours: num_free"),
    "a cache that finds one block too few": (
        "prefix_cache", "for digest in hashes:", "for digest in hashes[:-1]:", "yours: blocks found: "),
    "hashes that know nothing of the parent": (
        "prefix_cache", "sha256(parent + raw[start", "sha256(raw[start", "chain: yours: two blocks with other parents"),
    "an allocator that leaks": (
        "blocks", "heapq.heappush(self._heap, block)", "block % 3 and heapq.heappush(self._heap, block)",
        r"BlockAllocator.free: yours: num_free \d+; the reference: num_free \d+"),
    "an allocator that hands a block out twice": (
        "blocks", "ids = [heapq.heappop(self._heap) for _ in range(n)]", "ids = [self._heap[0]] * n; del self._heap[:n]",
        r"yours: hands out block 1, which is held"),
    "an allocator that hands out the dummy": (
        "blocks", "list(range(1, num_blocks))", "list(range(num_blocks - 1))", "yours: hands out block 0"),
    "a table that rounds down": (
        "blocks", "-(-num_tokens // self.block_size)", "(num_tokens // self.block_size)",
        "BlockTable.missing: yours: missing: "),
    "slots that are off by one block": (
        "blocks", "self.blocks[first : -(-stop", "self.blocks[first // 2 : -(-stop", "BlockTable.extend: yours: slots"),
    "a split that goes over": ("chunked", "min(tokens, chunk, budget)", "min(tokens, chunk)", r"split: yours: tokens \["),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_found_and_said_and_does_not_change_what_is_served(
    what: str, alone: Answers, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    part, find, replace, said = DIFFERENT[what]
    shadow = Shadow(part, file := edited(part, tmp_path, find, replace))
    assert serve({part: shadow}) == alone
    assert shadow.difference is not None
    assert re.search(said, shadow.difference), shadow.difference
    assert f"the shadow of {part} (stage {PARTS[part].stage}, {file}) stopped at step " in shadow.difference
    assert capfd.readouterr().err == f"{shadow.difference}. Serving goes on with the reference.\n"


SAME = {  # what is different and right -> part, edit
    "its own file": ("blocks", "", ""),
    "other ids": ("blocks", "heapq.heappop(self._heap) for", "self._heap.pop() for"),
    "ids as NumPy has them": ("blocks", "return ids", "return np.array(ids)"),
    "a cache": ("prefix_cache", "", ""),
    "a cache that hands out in another order": ("prefix_cache", "        return ids\n", "        return ids[::-1]\n"),
    "another hash": ("prefix_cache", "hashlib.sha256(", "hashlib.blake2b("),
    "a scheduler": ("scheduler", "", ""),
    "rows in another order": ("scheduler", "step.rows.append(", "step.rows.insert(0, "),
    "a split": ("chunked", "    return granted", "    return tuple(granted)"),
}  # fmt: skip


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("what", SAME)
def test_what_is_right_in_another_way_is_not_flagged(what: str, depth: int, tmp_path: Path) -> None:
    part, find, replace = SAME[what]
    shadow = Shadow(part, edited(part, tmp_path, find, replace))
    assert serve({part: shadow}, depth=depth) == serve({}, depth=depth)
    assert shadow.difference is None
    assert shadow.compared == shadow.calls > 200


def test_all_shadows_at_once(alone: Answers, tmp_path: Path) -> None:
    shadows = {part: Shadow(part, edited(part, tmp_path)) for part in SERVED}
    assert serve(shadows) == alone
    assert {part: shadow.difference for part, shadow in shadows.items()} == dict.fromkeys(SERVED)


SPOIL = """

def spoil(x, seen=None):
    seen = set() if seen is None else seen
    if id(x) in seen or isinstance(x, (int, str, bytes, frozenset, type(None))) or callable(x):
        return
    seen.add(id(x))
    for name in dir(x):
        if isinstance(x, (Request, SamplingParams, BlockTable)) and not name.startswith("_"):
            spoil(getattr(x, name), seen)
    if isinstance(x, (list, tuple)):
        for item in x:
            spoil(item, seen)
    if hasattr(x, "clear"):
        x.clear()
    for name in ("max_tokens", "computed", "num_prompt", "slot", "preemptions", "generation"):
        if hasattr(x, name):
            setattr(x, name, 1)


from cutaway.core.blocks import BlockTable
from cutaway.core.request import Request, SamplingParams


def _spoiling(function):
    def call(self, *args):
        try:
            return function(self, *args)
        finally:
            spoil([list(self.running), list(self.waiting), args])
    return call


Scheduler.schedule = _spoiling(Scheduler.schedule)
"""


def test_a_shadow_has_nothing_of_the_engines_to_spoil(alone: Answers, tmp_path: Path) -> None:
    shadow = Shadow("scheduler", edited("scheduler", tmp_path, more=SPOIL))
    assert serve({"scheduler": shadow}) == alone
    assert shadow.difference is not None


SPLIT = "def split(pending, budget, chunk):\n    "
BROKEN = {  # -> lines for the end of chunked.py, what is said
    "raises": (
        SPLIT + "return 1 // 0\n",
        "yours: raises ZeroDivisionError: .* at {file}, line {line}, in split; the reference: answers"),
    "exits": (SPLIT + "raise SystemExit\n", "yours: raises SystemExit at {file}"),
    "hangs": (
        SPLIT + "while True:\n        pass\n",
        "yours: has not answered within 0.2 s at {file}, line {line1}, in split"),
    "answers nothing": (SPLIT + "pass\n", "yours: answers None; the reference: answers "),
    "answers what cannot be shown": (
        "class X:\n    def __repr__(self):\n        return 1 // 0\n\n\n" + SPLIT + "return X()\n", "yours: answers a X; "),
    "raises what cannot be shown": (
        "class X(Exception):\n    __str__ = None\n\n\n" + SPLIT + "raise X\n", "yours: raises X at "),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_breaks_stops_with_its_file_and_line(what: str, alone: Answers, tmp_path: Path) -> None:
    text, said = BROKEN[what]
    file = edited("chunked", tmp_path, more=f"\n\n{text}")
    line = Path(file).read_text().count("\n")
    shadow = Shadow("chunked", file, patience=0.2)
    assert serve({"chunked": shadow}) == alone
    assert shadow.calls == 1
    pattern = said.replace("{file}", re.escape(file)).replace("{line}", str(line)).replace("{line1}", f"({line - 1}|{line})")
    assert re.search(pattern, shadow.difference or ""), shadow.difference


def test_a_constructor_that_raises_stops_it_as_well(alone: Answers, tmp_path: Path) -> None:
    shadow = Shadow("scheduler", edited("scheduler", tmp_path, "self._pool = cache.num_free", "raise KeyError('pool')"))
    assert serve({"scheduler": shadow}) == alone
    assert "Scheduler: yours: raises KeyError: 'pool' at" in (shadow.difference or "")


def test_the_two_errors_of_the_contract_are_decisions(tmp_path: Path) -> None:
    def follow(part: str, find: str = "", replace: str = "") -> tuple[Shadow, Callable[..., object]]:
        shadow = Shadow(part, edited(part, tmp_path, find, replace))
        return shadow, Parts(shadows={part: shadow}).get(part).BlockAllocator

    shadow, allocator = follow("blocks")
    with pytest.raises(Exception, match="9 blocks asked for"):
        allocator(4).allocate(9)  # pyright: ignore
    assert shadow.difference is None
    shadow, allocator = follow("blocks", "if n > len(self._heap):", "if False:")
    with pytest.raises(Exception, match="9 blocks asked for"):
        allocator(4).allocate(9)  # pyright: ignore
    assert "yours: raises IndexError" in (shadow.difference or "")
    assert "the reference: raises OutOfBlocks: 9 blocks asked for" in (shadow.difference or "")


def test_what_cannot_be_a_shadow_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match="the part metrics cannot run as a shadow; those that can are blocks, attention,"):
        Shadow("metrics", "x.py")
    (file := tmp_path / "mine.py").write_text("x = 1\n")
    with pytest.raises(CutawayError, match="it does not define split"):
        Shadow("chunked", str(file))
    with pytest.raises(CutawayError, match="--shadow takes NAME=FILE, got '10'"):
        config_from(shadow=["10"])
    with pytest.raises(CutawayError, match="beside the engine's own part, so --part cannot replace"):
        config_from(shadow=[f"chunked={file}"], part=[f"chunked={file}"])
    assert config_from(shadow=[f"chunked={file}"]).shadow == {"chunked": str(file)}
    assert set(FOLLOWERS) <= set(PARTS)


def test_the_engine_process_reports_its_shadows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """/health shows what the process tells of its parts."""
    good = edited("scheduler", tmp_path)
    bad = edited("chunked", tmp_path, "min(tokens, chunk, budget)", "max(tokens - 1, 0)")

    async def work() -> tuple[list[int], dict[str, dict[str, object]]]:
        channel = ProcessChannel(fake(shadow={"scheduler": good, "chunked": bad}))
        async with running(channel) as engine:
            output = await collect(engine, ask(1, max_tokens=6))
            await until(lambda: channel.ready["parts"]["scheduler"]["shadow"]["calls"] > 12)
            return output.token_ids, channel.ready["parts"]

    async def without() -> list[int]:
        async with running(ProcessChannel(fake())) as engine:
            return (await collect(engine, ask(1, max_tokens=6))).token_ids

    ids, parts = run(work())
    assert ids == run(without())
    assert parts["scheduler"]["reference"] is True
    assert parts["scheduler"]["shadow"]["difference"] is None  # pyright: ignore
    said = parts["chunked"]["shadow"]["difference"]  # pyright: ignore
    assert "stage 11" in said
    assert said in capfd.readouterr().err
    assert "shadow" not in parts["blocks"]
    assert parts_of(fake()).report()["scheduler"].keys() == parts["blocks"].keys()
