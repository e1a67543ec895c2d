"""Paged rows to attend to, and attention over dense keys that says what the answer is. For the checks of stages 07 and 08.

    case = paged([(1, 40), (5, 17)], heads=8, kv_heads=2, block_size=4)    # rows of (queries, context)
    error = case.error(lab, lambda: lab.app.paged_attention(*case.ragged, scale=case.scale))

Blocks are handed out in shuffled order. Whatever is no row's context holds `junk`, and past its own blocks a row's table names
a block of junk: the number that comes of touching it is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course.runner.checking import Lab

GUARD = 2  # blocks of junk before and after all others


@dataclass(slots=True)
class Paged:
    """q [tokens, heads, dim]; caches [block, kv_head, block_size, dim]; keys, values: of each row [context, kv_heads, dim]."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    scale: float

    @property
    def ragged(self) -> tuple[Tensor, ...]:
        """The arguments of `paged_attention`, but for scale."""
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens, self.query_starts

    @property
    def decode(self) -> tuple[Tensor, ...]:
        """The arguments of `paged_decode`, but for scale."""
        return self.ragged[:5]

    @property
    def kv_bytes(self) -> int:
        """Bytes of all rows' keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def dense(self) -> Tensor:
        """The answer, in float64 over keys that lie in a row: [tokens, heads, dim]."""
        answers: list[Tensor] = []
        starts = self.query_starts.tolist()
        for q, k, v in zip(torch.tensor_split(self.q.double(), starts[1:-1]), self.keys, self.values, strict=True):
            context, group = len(k), self.q.shape[1] // k.shape[1]
            k, v = (t.double().repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
            scores = q.transpose(0, 1) @ k.transpose(1, 2) * self.scale
            at = torch.arange(context, device=q.device)
            scores = scores.masked_fill(at > at[context - len(q) :, None], -torch.inf)
            answers.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(answers)

    def answer(self, lab: Lab, call: Callable[[], Any]) -> Tensor:
        """What `call` answers, for sure a tensor of the right shape and dtype."""
        before = self.q._version
        got = call()
        lab.expect(self.q._version == before, "the answer is written into q: make a tensor of its own for it")
        shape, dtype = list(self.q.shape), self.q.dtype
        told = f"{list(got.shape)} {got.dtype}" if isinstance(got, Tensor) else type(got).__name__
        fits = isinstance(got, Tensor) and list(got.shape) == shape and got.dtype == dtype
        lab.expect(
            fits, "the answer is one tensor with the shape and the dtype of q", f"yours: {told}; expected {shape} {dtype}"
        )
        return got

    def error(self, lab: Lab, call: Callable[[], Any]) -> float:
        """The largest difference of an answer to the dense one; inf where it is not a number."""
        return worst((self.answer(lab, call).double() - self.dense()).abs())


def worst(differences: Tensor) -> float:
    found = differences.max().item() if differences.numel() else 0.0
    return math.inf if math.isnan(found) else found


def paged(
    rows: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 4,
    dim: int = 16,
    block_size: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    junk: float = math.nan,
    spare: int = 0,
    wider: int = 2,
    seed: int = 0,
) -> Paged:
    """Rows of (queries, context) over a pool with `spare` blocks that nobody uses, and tables `wider` than the longest row
    needs. The same seed gives the same numbers whatever the block size, the pool, the order of its blocks or the junk."""
    numbers, order = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1000 + seed + spare)
    needed = [-(-context // block_size) for _, context in rows]
    pool = sum(needed) + spare + 2 * GUARD
    k_cache, v_cache = (torch.full((pool, kv_heads, block_size, dim), junk, dtype=dtype) for _ in range(2))
    tables = torch.full((len(rows), max(needed) + wider), pool - 1, dtype=torch.int32)
    ids = (GUARD + torch.randperm(pool - 2 * GUARD, generator=order)).tolist()
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for row, (_, context) in enumerate(rows):
        tables[row, : needed[row]] = torch.tensor([ids.pop() for _ in range(needed[row])])
        block, offset = tables[row, torch.arange(context) // block_size].long(), torch.arange(context) % block_size
        for cache, kept in ((k_cache, keys), (v_cache, values)):
            kept.append(torch.randn(context, kv_heads, dim, generator=numbers).to(dtype))
            cache[block, :, offset] = kept[-1]
    starts = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0)
    q = torch.randn(int(starts[-1]), heads, dim, generator=numbers).to(dtype)
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    there = [t.to(device) for t in (q, k_cache, v_cache, tables, contexts, starts.to(torch.int32))]
    return Paged(*there, [k.to(device) for k in keys], [v.to(device) for v in values], dim**-0.5)


class BytesMade(TorchDispatchMode):
    """Counts the bytes of all tensors that come into being while it is on: views of others are free.

    with BytesMade() as made:
        paged_attention(...)
    made.total
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch asks; with True it imports its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {storage.data_ptr() for storage in _storages((args, kwargs))}
        out = func(*args, **kwargs)
        for storage in {s.data_ptr(): s for s in _storages(out)}.values():
            if storage.data_ptr() not in known:
                self.total += storage.nbytes()
        return out


class HostReads(TorchDispatchMode):
    """Counts the numbers that Python takes out of tensors while it is on (`.item()`, `int(…)`, `if …`): each waits for a GPU.
    On a CPU `.tolist()` and `.numpy()` go unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _storages(thing: Any) -> list[torch.UntypedStorage]:
    if isinstance(thing, Tensor):
        return [thing.untyped_storage()]
    if isinstance(thing, torch.UntypedStorage):
        return [thing]
    if isinstance(thing, dict):
        return _storages(tuple(thing.values()))
    return [s for each in thing for s in _storages(each)] if isinstance(thing, list | tuple) else []
