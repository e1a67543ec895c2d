"""What makes gathering fast: one preparation a step, whose plan every layer's attention takes.

Rows with as many queries each, and of similar length, are gathered and attended to in one call; long prompts go piece by
piece; a row whose blocks follow each other is read where it lies. The numbers are those of `attention.py` without a plan.

The engine calls `prepare` once a step, for an attention part that lists "plan" in `SUPPORTS`, and hands its result to every
layer. A cache is contiguous, or such a one transposed that has its heads first ("head_first" asks the engine for that): there,
a row's consecutive blocks are one run of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

PIECE = 128  # queries of one row attended to at once: bounds the mask, and skips most of what causality hides
SMALL = 8  # rows of up to this many queries are stacked with others of their length
PADDING = 768  # keys of padding that cost about as much as one more group


class Place(NamedTuple):
    """Part of a cache as one strided view: a single call, where slicing takes four."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, cache: Tensor) -> Tensor:
        return cache.as_strided(self.shape, self.strides, cache.storage_offset() + self.offset)


@dataclass(slots=True)
class Group:
    """Rows with one number of queries, attended to in one call. `spare` is false where no gathered key is past its row's
    context, as with a single row, or where all such keys are known to be finite."""

    tokens: Tensor | slice  # which of the step's tokens are its queries, row by row
    rows: int
    queries: int
    context: int  # keys a row: those of a single row, else a multiple of the block size
    lengths: NDArray[np.int64]  # [rows] context of each row's last query
    blocks: Tensor  # int64 [rows * kv_heads * blocks a row]: where each block of a head is among all in memory
    run: Place | None  # [1, kv_heads, context, dim] of a single row whose blocks follow each other, up to SMALL queries
    spare: bool
    masks: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def mask(self, window: int, group: int, dtype: torch.dtype) -> Tensor | None:
        """0 where a query sees a key, -inf elsewhere: [rows, 1, queries * group, context]; made once a step and window. None
        for a single query that sees all keys."""
        if self.rows * self.queries == 1 and not 0 < window < self.context:
            return None
        if window not in self.masks:
            last = np.arange(self.queries)[None, :] + (self.lengths - self.queries)[:, None]  # each query's position
            keys = np.arange(self.context)
            seen = keys <= last[:, :, None]
            if window:
                seen &= keys > last[:, :, None] - window
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
            if self.queries > 1:  # with one query the mask broadcasts over the heads of a group
                mask = mask.repeat_interleave(group, 1)
            self.masks[window] = mask.unsqueeze(1)
        return self.masks[window]


@dataclass(slots=True)
class Plan:
    """What the layers of one step share. writes: int64 [tokens * kv_heads], where each head's dim numbers go among all in
    memory; of a single token its place [1, kv_heads, dim] instead."""

    writes: Tensor | Place | None
    groups: list[Group]

    def write(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes k and v [tokens, kv_heads, dim] of the step's tokens to their slots."""
        for cache, new in ((k_cache, k), (v_cache, v)):
            if isinstance(self.writes, Place):
                self.writes.of(cache).copy_(new)
            elif self.writes is not None:
                _flat(cache, cache.shape[3]).index_copy_(0, self.writes, new.reshape(-1, cache.shape[3]))

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int) -> Tensor:
        """Attention of the step's tokens, [tokens, heads, dim] both."""
        if len(self.groups) == 1 and isinstance(self.groups[0].tokens, slice):
            return _attend(q, k_cache, v_cache, self.groups[0], scale, window)
        out = torch.empty_like(q)
        for group in self.groups:
            out[group.tokens] = _attend(q[group.tokens], k_cache, v_cache, group, scale, window)
        return out


def prepare(
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    cache: Tensor,
    *,
    slots: Tensor | None = None,
    finite: bool = False,
) -> Plan:
    """Groups the rows of a step over caches with the shape and layout of `cache`. `finite` promises that they hold finite
    numbers throughout, so that a mask is enough."""
    tables, lengths = block_tables.numpy().astype(np.int64), context_lens.numpy().astype(np.int64)
    starts = query_starts.numpy().astype(np.int64)
    pieces: dict[int, list[tuple[int, int, int]]] = {}  # queries -> (row, first token, context of the last query)
    for row, (start, stop, length) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), lengths.tolist(), strict=True)):
        for first in range(start, stop, PIECE):
            n = min(PIECE, stop - first)
            pieces.setdefault(n, []).append((row, first, length - (stop - first) + n))
    groups: list[Group] = []
    for n, members in pieces.items():
        for part in _buckets(members) if n <= SMALL else [[m] for m in members]:
            groups.append(_group(n, part, tables, cache, finite))
    writes = None if slots is None else _write_rows(slots, cache)
    return Plan(writes, groups)


def _buckets(members: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Rows of one group are gathered at its longest context: the cut of the rows, longest first, that makes the sum of
    gathered keys and PADDING a group least."""
    order = sorted(members, key=lambda m: -m[2])
    lengths = np.array([m[2] for m in order])
    if lengths[0] * len(order) - lengths.sum() <= PADDING:
        return [members]
    cost, cut = np.zeros(len(order) + 1), [0] * (len(order) + 1)  # of the first i rows; where their last group begins
    for i in range(1, len(order) + 1):
        costs = cost[:i] + lengths[:i] * (i - np.arange(i)) + PADDING
        cut[i] = int(costs.argmin())
        cost[i] = costs[cut[i]]
    buckets: list[list[tuple[int, int, int]]] = []
    end = len(order)
    while end:
        buckets.append(sorted(order[cut[end] : end]))
        end = cut[end]
    return buckets


def _group(n: int, members: Sequence[tuple[int, int, int]], tables: NDArray[np.int64], cache: Tensor, finite: bool) -> Group:
    _, kv_heads, block_size, dim = cache.shape
    block_step, head_step = _steps(cache)
    rows, firsts, lengths = (np.array(column, dtype=np.int64) for column in zip(*members, strict=True))
    blocks = -(-int(lengths.max()) // block_size)
    used = np.arange(blocks) < -(-lengths // block_size)[:, None]
    table = np.where(used, tables[rows, :blocks], 0)  # past a row's context a table may hold anything
    gather = table[:, None, :] * block_step + np.arange(kv_heads)[:, None] * head_step
    alone = len(members) == 1
    context, run = int(lengths[0]) if alone else blocks * block_size, None
    # many queries read their keys so often that a compact copy of them pays
    if alone and n <= SMALL and block_step == 1 and bool((np.diff(table[0]) == 1).all()):
        strides = (0, cache.stride(1), dim, 1)
        run = Place((1, kv_heads, context, dim), strides, int(table[0, 0]) * cache.stride(0))
    tokens = (firsts[:, None] + np.arange(n)).reshape(-1)
    first, count = int(tokens[0]), len(tokens)
    together = bool((tokens == np.arange(first, first + count)).all())
    return Group(
        tokens=slice(first, first + count) if together else torch.from_numpy(tokens),
        rows=len(members), queries=n, context=context, lengths=lengths,
        blocks=torch.from_numpy(gather.reshape(-1)), run=run,
        spare=not finite and not alone and bool((lengths < blocks * block_size).any()),
    )  # fmt: skip


def _write_rows(slots: Tensor, cache: Tensor) -> Tensor | Place:
    _, kv_heads, block_size, dim = cache.shape
    if len(slots) == 1:
        block, offset = divmod(int(slots[0]), block_size)
        return Place((1, kv_heads, dim), (0, cache.stride(1), 1), block * cache.stride(0) + offset * dim)
    block_step, head_step = _steps(cache)
    block, offset = np.divmod(slots.numpy().astype(np.int64), block_size)
    rows = (block[:, None] * block_step + np.arange(kv_heads) * head_step) * block_size + offset[:, None]
    return torch.from_numpy(rows.reshape(-1))


def _steps(cache: Tensor) -> tuple[int, int]:
    """How far the next block and the next head are, in blocks of one head."""
    _, _, block_size, dim = cache.shape
    return cache.stride(0) // (block_size * dim), cache.stride(1) // (block_size * dim)


def _flat(cache: Tensor, width: int) -> Tensor:
    """The cache as [.., width], in the order of its memory."""
    return (cache.transpose(0, 1) if cache.stride(0) < cache.stride(1) else cache).view(-1, width)


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Group, scale: float, window: int) -> Tensor:
    """One group. The query heads that share a key head lie beside each other as further queries: [rows, kv_heads,
    queries * group, dim]. So keys are gathered once and never repeated, seven times the speed of `enable_gqa` in bf16."""
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    k, v = _gather(k_cache, rows), _gather(v_cache, rows)
    if rows.spare:  # -inf hides a finite score, not NaN, and 0 * NaN is NaN
        past = torch.from_numpy(np.arange(rows.context) >= rows.lengths[:, None]).view(rows.rows, 1, rows.context, 1)
        k, v = k.masked_fill_(past, 0.0), v.masked_fill_(past, 0.0)
    q = q.view(rows.rows, rows.queries, kv_heads, group, dim)
    q = q.squeeze(1) if rows.queries == 1 else q.transpose(1, 2).reshape(rows.rows, kv_heads, -1, dim)
    mask = rows.mask(window, group, q.dtype)
    if mask is None or q.dtype == torch.float32 or rows.rows * rows.queries == 1:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        out = _attend_in_halves(q, k, v, mask, scale)
    if rows.queries > 1:
        out = out.view(rows.rows, kv_heads, rows.queries, group, dim).transpose(1, 2)
    return out.reshape(-1, heads, dim)


def _gather(cache: Tensor, rows: Group) -> Tensor:
    """Keys or values of a group, [rows, kv_heads, context, dim]: a view of the cache where they are one run."""
    if rows.run is not None:
        return rows.run.of(cache)
    _, kv_heads, block_size, dim = cache.shape
    blocks = _flat(cache, block_size * dim).index_select(0, rows.blocks).view(rows.rows, kv_heads, -1, dim)
    return blocks.narrow(2, 0, rows.context) if rows.rows == 1 else blocks


def _attend_in_halves(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale + mask) v as three calls: for bf16 on a CPU two to four times the speed of the fused one, but for a
    single query. Sums are float32; scores and weights are rounded to bf16 between the calls, as eager attention has it."""
    rows, kv_heads, queries, dim = q.shape
    mask = mask.expand(rows, kv_heads, queries, -1).flatten(0, 1)
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(rows, kv_heads, queries, dim)
