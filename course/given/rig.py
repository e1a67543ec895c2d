"""The real engine around the module under test, small enough for a check.

engine = fake_engine(scheduler=lab.app, num_blocks=33, rows=4, budget=64)     # no model: ids are a hash of the KV pool
engine = ladder_engine(attention=lab.app, num_blocks=33)                      # the ladder model, fp32
steps = run(engine, [request(0, [5, 6, 7], max_tokens=8)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Literal

from cutaway.backends.fake import FakeBackend
from cutaway.core.plan import Limits
from cutaway.core.request import Output, Request, SamplingParams
from cutaway.engine.engine import Engine
from cutaway.engine.parts import PARTS, Parts

BLOCK_SIZE = 16
Preemption = Literal["recompute", "swap"]
Switch = bool | ModuleType


def parts_with(**modules: ModuleType | Any) -> Parts:
    """The engine's own parts, but for these modules (name -> module): what `Parts` does with files, for modules in memory."""
    parts = Parts()
    for name, module in modules.items():
        parts.loaded[name, PARTS[name].default] = module
    return parts


def limits_of(num_blocks: int, **given: int) -> Limits:
    """Limits with a window of the whole pool, unless `given` says otherwise."""
    size = given.get("block_size", BLOCK_SIZE)
    budget = given.get("budget", 512)
    return Limits(**({"window": (num_blocks - 1) * size, "chunk": budget, "block_size": size} | given))


def _switch(prefix_cache: Switch, modules: dict[str, Any]) -> bool:
    """Whether blocks are published. The switch has the part's name: a module in its place plays the part, switched on."""
    if isinstance(prefix_cache, bool):
        return prefix_cache
    modules["prefix_cache"] = prefix_cache
    return True


def fake_engine(*, num_blocks: int = 65, depth: int = 0, prefix_cache: Switch = True, limits: dict[str, int] | None = None,
                preemption: Preemption = "recompute", **modules: ModuleType | Any) -> Engine:  # fmt: skip
    """An engine on `FakeBackend`, whose answers change if a single block is wrong. modules: parts in place of the engine's."""
    bounds = limits_of(num_blocks, **(limits or {}))
    prefix_cache = _switch(prefix_cache, modules)
    backend = FakeBackend(num_blocks, bounds.block_size, vocabulary=1000, delay=depth)
    return Engine(backend, parts_with(**modules), bounds, prefix_cache=prefix_cache, depth=depth, preemption=preemption)


def ladder_engine(*, num_blocks: int = 65, prefix_cache: Switch = True, limits: dict[str, int] | None = None, model: Any = None,
                  preemption: Preemption = "recompute", **modules: ModuleType | Any) -> Engine:  # fmt: skip
    """An engine on the torch backend with a model of `course.given.torch_model` (default: the ladder model)."""
    import torch

    from course.given.torch_model import load
    from cutaway.backends.torch.kv_cache import KVCache
    from cutaway.backends.torch.runner import TorchBackend

    model = model or load()
    bounds = limits_of(num_blocks, **(limits or {}))
    prefix_cache = _switch(prefix_cache, modules)
    parts = parts_with(**modules)
    attention = parts.get("attention")
    with torch.inference_mode():
        cache = KVCache(model.decoder.config, num_blocks, bounds.block_size, model.dtype,
                        head_first="head_first" in getattr(attention, "SUPPORTS", ()))  # fmt: skip
    backend = TorchBackend(model.decoder, cache, attention, parts, rows=bounds.rows, window=bounds.window, facts={})
    return Engine(backend, parts, bounds, prefix_cache=prefix_cache, preemption=preemption)


def request(
    id: int, tokens: Sequence[int], *, max_tokens: int, stop_ids: Iterable[int] = (), engine: Engine | None = None
) -> Request:
    """A greedy request. With `engine`, its hash chain is filled as the front would, so that it can hit the prefix cache."""
    asked = Request(id, list(tokens), SamplingParams(temperature=0.0, max_tokens=max_tokens), frozenset(stop_ids))
    if engine is not None:
        from cutaway.core.prefix_cache import chain

        asked.hashes = chain(asked.tokens, engine.limits.block_size)
    return asked


def run(engine: Engine, requests: Sequence[Request], *, most_steps: int = 10_000,
        each: Callable[[Engine, list[Output]], None] | None = None) -> int:  # fmt: skip
    """Adds the requests and steps until all have ended; answers the number of steps. `each` sees every step."""
    for asked in requests:
        engine.add(asked)
    for step in range(most_steps):
        if not engine.has_work:
            return step
        outputs = engine.step()
        if each is not None:
            each(engine, outputs)
    raise RuntimeError(f"requests are left after {most_steps} steps")
