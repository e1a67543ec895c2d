"""The composition root: which file plays which part.

A part is one module (one stage of the ladder). The engine names its own by import string and loads it here, so a file
written by somebody else can take its place: `Parts({"scheduler": "app/s10_scheduler.py"})`. What a part must offer is its
Protocol below; the engine asks nothing beyond it of a file that is not its own, except features that the file lists in
`SUPPORTS`. Requests that need another feature use the engine's own part, and `report()` says so.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cutaway.core.errors import CutawayError
from cutaway.core.plan import Schedule
from cutaway.core.request import Output, Request, Table

Process = Literal["front", "engine"]


class PartFault(CutawayError):
    """A part that somebody else wrote is at fault: its line, the parts that can have been it, whether it never came back."""

    def __init__(self, line: str, parts: Sequence[str], hung: bool = False):
        super().__init__(line)
        self.parts = list(parts)
        self.hung = hung


class AllocatorLike(Protocol):
    @property
    def num_free(self) -> int: ...
    def allocate(self, n: int = 1) -> list[int]: ...
    def free(self, ids: Iterable[int]) -> None: ...


class TableLike(Table, Protocol):
    def slot(self, position: int) -> int: ...
    def slots(self, start: int, stop: int) -> NDArray[np.int32]: ...


class BlocksPart(Protocol):
    """06 core/blocks.py"""

    OutOfBlocks: type[Exception]
    BlockAllocator: Callable[..., AllocatorLike]  # (num_blocks, block_size=16)
    BlockTable: Callable[..., TableLike]  # (block_size=16)


class CacheLike(Protocol):
    @property
    def num_free(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_used(self) -> int: ...
    def lookup(self, hashes: Sequence[bytes]) -> list[int]: ...
    def allocate(self, n: int) -> list[int]: ...
    def publish(self, block: int, digest: bytes) -> int: ...
    def fork(self, ids: Iterable[int]) -> None: ...
    def release(self, ids: Iterable[int]) -> None: ...
    def prepare_write(self, block: int) -> tuple[int, int | None]: ...
    def check(self) -> None: ...


class PrefixCachePart(Protocol):
    """09 core/prefix_cache.py. The parent of the first block is `namespace`, so a chain goes on from its last hash."""

    PrefixCache: Callable[..., CacheLike]  # (allocator, publish=True)

    def chain(self, tokens: Sequence[int], block_size: int, namespace: bytes = b"") -> list[bytes]: ...


Split = Callable[[Sequence[int], int, int], list[int]]


class SchedulerLike(Protocol):
    @property
    def waiting(self) -> Sequence[Request]: ...
    @property
    def running(self) -> Sequence[Request]: ...
    def add(self, request: Request) -> None: ...
    def abort(self, id: int) -> None: ...
    def schedule(self) -> Schedule: ...
    def apply(self, done: Sequence[tuple[Request, list[int]]]) -> list[Request]: ...
    def check(self) -> None: ...


class SchedulerPart(Protocol):
    """10 core/scheduler.py"""

    Scheduler: Callable[..., SchedulerLike]  # (cache, limits: Limits, split=whole_or_nothing)


class ChunkedPart(Protocol):
    """11 core/chunked.py"""

    def split(self, pending: Sequence[int], budget: int, chunk: int) -> list[int]: ...


class AttentionPart(Protocol):
    """07 backends/torch/attention.py. Caches [block, kv_head, block_size, dim]; q [tokens, heads, dim], ragged rows."""

    write_kv: Callable[..., Any]  # (k_cache, v_cache, k, v, slots)
    paged_attention: Callable[..., Any]  # (q, k_cache, v_cache, block_tables, context_lens, query_starts, *, scale)


class SamplerPart(Protocol):
    """13 backends/torch/sampler.py"""

    penalize: Callable[..., Any]  # (logits, rows)
    keep: Callable[..., Any]  # (logits, rows)
    noise: Callable[..., Any]  # (seeds, positions, vocabulary)
    sample: Callable[..., Any]  # (logits, rows, mask=None) -> Sampled


class DetokenizerLike(Protocol):
    text: str
    stopped: bool
    stop_reason: str | None

    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class DetokenizerPart(Protocol):
    """14 text/detokenizer.py"""

    Detokenizer: Callable[..., DetokenizerLike]  # (tokenizer, prompt_ids, stop=(), include_stop=False)


class Channel(Protocol):
    """The way to an engine: in this process, or through a socket to its own. Given to part 15."""

    async def start(self) -> None:
        """Returns when the engine can take requests."""
        ...

    async def stop(self) -> None: ...
    def add(self, request: Request) -> None:
        """Never waits; while the engine is being restarted the request does. Raises EngineDied where there is none to come."""
        ...

    def abort(self, ids: Sequence[int]) -> None: ...
    async def receive(self) -> list[Output]:
        """Waits for the next step's outputs. Raises EngineDied when the engine is gone for good."""
        ...


class AsyncEngineLike(Protocol):
    @property
    def num_active(self) -> int: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def generate(self, request: Request) -> AsyncIterator[Output]: ...


class AsyncEnginePart(Protocol):
    """15 engine/async_engine.py"""

    AsyncEngine: Callable[[Channel], AsyncEngineLike]


class MetricsLike(Protocol):
    def arrived(self, id: int, t: float, prompt_tokens: int) -> None: ...
    def scheduled(self, id: int, t: float, cached_tokens: int) -> None: ...
    def tokens(self, id: int, t: float, n: int) -> None: ...
    def finished(self, id: int, t: float, reason: str) -> None: ...
    def step(self, t: float, used: int, total: int, rows: int, preempted: int) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...
    def goodput(self, ttft: float, itl: float) -> float: ...


class MetricsPart(Protocol):
    """16 core/metrics.py"""

    Metrics: Callable[[], MetricsLike]
    percentile: Callable[[Sequence[float], float], float]
    poisson: Callable[[float, int, int], list[float]]


@dataclass(frozen=True, slots=True)
class Part:
    """One part. `offers`: names its module must define. `features`: what the engine's own can do beyond the contract."""

    name: str
    stage: str
    process: Process
    default: str
    protocol: type
    offers: dict[str, type | None]  # name -> the Protocol of a class, whose methods it must have
    features: frozenset[str] = frozenset()


_SAMPLER_FEATURES = frozenset({"top_k", "top_p", "min_p", "penalties", "logprobs"})
PARTS: dict[str, Part] = {
    p.name: p
    for p in (
        Part("blocks", "06", "engine", "cutaway.core.blocks", BlocksPart,
             {"OutOfBlocks": None, "BlockAllocator": AllocatorLike, "BlockTable": TableLike}),
        Part("attention", "07", "engine", "cutaway.backends.torch.attention", AttentionPart,
             {"write_kv": None, "paged_attention": None}, frozenset({"sliding_window"})),
        Part("prefix_cache", "09", "engine", "cutaway.core.prefix_cache", PrefixCachePart,
             {"PrefixCache": CacheLike, "chain": None}),
        Part("scheduler", "10", "engine", "cutaway.core.scheduler", SchedulerPart, {"Scheduler": SchedulerLike}),
        Part("chunked", "11", "engine", "cutaway.core.chunked", ChunkedPart, {"split": None}),
        Part("sampler", "13", "engine", "cutaway.backends.torch.sampler", SamplerPart,
             dict.fromkeys(("penalize", "keep", "noise", "sample")), _SAMPLER_FEATURES),
        Part("detokenizer", "14", "front", "cutaway.text.detokenizer", DetokenizerPart, {"Detokenizer": DetokenizerLike}),
        Part("async_engine", "15", "front", "cutaway.engine.async_engine", AsyncEnginePart, {"AsyncEngine": AsyncEngineLike}),
        Part("metrics", "16", "front", "cutaway.core.metrics", MetricsPart,
             {"Metrics": MetricsLike, "percentile": None, "poisson": None},
             frozenset({"step_seconds"})),
    )
}  # fmt: skip


class Beside(Protocol):
    """Somebody's part that runs beside the engine's own (`engine.shadow.Shadow`)."""

    def beside(self, module: ModuleType) -> ModuleType: ...
    def report(self) -> dict[str, Any]: ...


Observe = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]  # (name of the call, args, kwargs, result)


def load_module(source: str) -> ModuleType:
    """A module by import string, or by the path of a file."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    if not path.is_file():
        raise CutawayError(f"no such file: {path}")
    name = f"cutaway_part_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclass(slots=True)
class Parts:
    """The parts of one engine: its own, but for `overrides` (name -> import string or file). `shadows` run beside its own.
    step: the engine's, for what is said of a part."""

    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    observe: Mapping[str, Observe] = field(default_factory=dict[str, Observe])
    shadows: Mapping[str, Beside] = field(default_factory=dict[str, Beside])
    step: int = 0
    loaded: dict[tuple[str, str], ModuleType] = field(default_factory=dict[tuple[str, str], ModuleType])  # by part and source
    fallbacks: dict[str, set[str]] = field(default_factory=dict[str, set[str]])  # part -> features the reference served
    dropped: dict[str, str] = field(default_factory=dict[str, str])  # part -> the fault for which it was left

    def __post_init__(self) -> None:
        for name in (*self.overrides, *self.observe, *self.shadows):
            if name not in PARTS:
                raise CutawayError(f"there is no part called {name}; the parts are {', '.join(PARTS)}")
        if both := self.overrides.keys() & self.shadows.keys():
            raise CutawayError(f"{', '.join(both)}: a shadow runs beside the engine's own part, not beside another file")

    def get(self, name: str, features: Iterable[str] = ()) -> Any:
        """The module that plays `name`, or the engine's own where `features` are asked that the other lacks."""
        part = PARTS[name]
        source = self.overrides.get(name, part.default)
        module = self._load(part, source)
        lacking = set(features) - set(getattr(module, "SUPPORTS", part.features if source == part.default else ()))
        if lacking and source != part.default:
            self.fallbacks.setdefault(name, set()).update(lacking)
            module = self._load(part, part.default)
        return module

    def load(self, process: Process) -> None:
        """Loads the overrides of a process now: one that cannot play is said at start. Raises CutawayError."""
        for name in self.overrides:
            if PARTS[name].process == process:
                self.get(name)

    def _load(self, part: Part, source: str) -> ModuleType:
        key = part.name, source
        if key not in self.loaded:
            own = source == part.default
            module = load_module(source) if own else _load_foreign(part, source)
            if missing := _missing(module, part):
                line = f"{source} cannot be the part {part.name}: it does not define {', '.join(missing)}"
                raise CutawayError(line) if own else PartFault(line, [part.name])
            if part.name in self.observe and source == self.overrides.get(part.name, part.default):
                module = observed(module, part.offers, self.observe[part.name])
            if own and part.name in self.shadows:
                module = self.shadows[part.name].beside(module)
            self.loaded[key] = module
        return self.loaded[key]

    def leave(self, fault: PartFault) -> None:
        """From now on the engine's own is got in the place of parts at fault. Whoever has the others' objects keeps them."""
        self.dropped.update(dict.fromkeys(fault.parts, str(fault)))
        self.overrides = {name: source for name, source in self.overrides.items() if name not in self.dropped}

    def files(self) -> dict[str, Part]:
        """The files of the overrides, as a stack names them."""
        return {
            str(getattr(self.loaded.get((name, source)), "__file__", None) or Path(source).resolve()): PARTS[name]
            for name, source in self.overrides.items()
        }

    def report(self) -> dict[str, dict[str, Any]]:
        """For `/health`: whose file plays each part, and what the reference had to serve in its place."""
        return {
            p.name: {
                "stage": p.stage,
                "process": p.process,
                "source": self.overrides.get(p.name, p.default),
                "reference": p.name not in self.overrides,
                "reference_served": sorted(self.fallbacks.get(p.name, ())),
                **({"dropped": self.dropped[p.name]} if p.name in self.dropped else {}),
                **({"shadow": self.shadows[p.name].report()} if p.name in self.shadows else {}),
            }
            for p in PARTS.values()
        }


def _missing(module: ModuleType, part: Part) -> list[str]:
    """What a module lacks of its part: names, and methods of its classes. Attributes are set by instances and not seen."""
    missing: list[str] = []
    for name, shape in part.offers.items():
        thing = getattr(module, name, None)
        if thing is None:
            missing.append(name)
        elif shape is not None:
            wanted = [m for base in shape.__mro__ for m, f in vars(base).items() if inspect.isfunction(f) and m[0] != "_"]
            missing += [f"{name}.{m}" for m in dict.fromkeys(wanted) if not callable(getattr(thing, m, None))]
    return missing


def _load_foreign(part: Part, source: str) -> ModuleType:
    """Somebody else's file: whatever it raises while it is loaded is said with the part, its stage, the file and the line."""
    try:
        return load_module(source)
    except CutawayError:
        raise
    except (Exception, SystemExit) as error:
        line = getattr(error, "lineno", None)
        if line is None:
            frames = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == Path(source).resolve()]
            line = frames[-1] if frames else None
        where = source if line is None else f"{source}, line {line}"
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PartFault(f"{where}: cannot be the part {part.name} (stage {part.stage}): {what}", [part.name]) from error


def observed(module: ModuleType, names: Iterable[str], observe: Observe) -> ModuleType:
    """A module whose named functions, and public methods of whose named classes, report each call and its result."""
    copy = ModuleType(module.__name__, module.__doc__)
    copy.__dict__.update(module.__dict__)
    for name in names:
        thing = getattr(module, name)
        if inspect.isclass(thing) and not issubclass(thing, BaseException):
            methods = {m: _reporting(f"{name}.{m}", f, observe) for m, f in inspect.getmembers(thing, inspect.isfunction)
                       if not m.startswith("_")}  # fmt: skip
            setattr(copy, name, type(name, (thing,), methods))
        elif inspect.isfunction(thing):
            setattr(copy, name, _reporting(name, thing, observe))
    return copy


def _reporting(name: str, function: Callable[..., Any], observe: Observe) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        observe(name, args, kwargs, result)
        return result

    return call


__all__ = ["PARTS", "Channel", "Part", "PartFault", "Parts", "load_module"]
