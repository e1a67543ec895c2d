"""Attention of one new token a row over its paged context, in one pass over the keys (stage 08).

A program takes one row, one key head and one split of the row's keys. It walks them tile by tile: looks each key's block up
in the row's table, scores all query heads that share the key head at once, and folds the tile into a running softmax. So each
key is read once, and no row of scores is ever in memory. With few rows the keys of each are split, so that the whole card has
work; a second kernel merges the splits.

Invariants: the output depends on keys below the context length alone, whatever their blocks hold past it; the same
arguments give the same bits. The running softmax is FlashAttention's (Dao et al. 2022), the splits are Flash-Decoding's (2023).
"""

# pyright: basic, reportCallIssue=false

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DOTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LOG2_E = 1.4426950408889634
TILE_BYTES = 16384  # of a tile of keys: that of values and what is on its way come to it, and a T4 has 64 KB in all
MIN_TILES = 4  # a split has at least as many: below, merging costs more than it saves
MAX_SPLITS = 32
WAVES = 4  # programs for each multiprocessor that hide each other's waiting


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, out_ptr, part_ptr, stat_ptr, scale, window,
    q_row, q_head, k_block, k_head, k_slot, v_block, v_head, v_slot, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One (row, key head, split). GROUP query heads in ROWS >= 16 rows, DIM numbers a head in WIDTH, a power of two: the rest
    is masked. scale includes log2(e). SPLIT: leaves acc, maximum and sum for `merge_kernel`; else the output itself. DOT: dtype
    of the factors of both products; their sums are fp32, and fp32 is not rounded to tf32."""
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, head = pair // KV_HEADS, pair % KV_HEADS
    context = tl.load(lens_ptr + row)
    first = tl.maximum(context - window, 0)
    share = tl.cdiv(tl.cdiv(context - first, TILE), splits) * TILE
    start = first + split * share
    stop = tl.minimum(start + share, context)

    d, g, n = tl.arange(0, WIDTH), tl.arange(0, ROWS), tl.arange(0, TILE)
    wide, real = d < DIM, g < GROUP
    q_at = q_ptr + row.to(tl.int64) * q_row + (head * GROUP + g[:, None]) * q_head + d[None, :]
    q = tl.load(q_at, mask=real[:, None] & wide[None, :], other=0.0).to(DOT)
    table = tables_ptr + row.to(tl.int64) * table_row
    k_at, v_at = k_ptr + head.to(tl.int64) * k_head + d[:, None], v_ptr + head.to(tl.int64) * v_head + d[None, :]

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for begin in range(start, stop, TILE):
        t = begin + n
        held = t < stop
        block = tl.load(table + t // BLOCK, mask=held, other=0).to(tl.int64)
        slot = t % BLOCK
        k = tl.load(k_at + (block * k_block + slot * k_slot)[None, :], mask=wide[:, None] & held[None, :], other=0.0)
        scores = tl.dot(q, k.to(DOT), input_precision="ieee") * scale
        scores = tl.where(held[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(weights, 1)
        # a weight of 0 does not silence a NaN that an old owner left in the block: it must not be loaded
        v = tl.load(v_at + (block * v_block + slot * v_slot)[:, None], mask=held[:, None] & wide[None, :], other=0.0)
        acc = tl.dot(weights.to(DOT), v.to(DOT), acc * shrink[:, None], input_precision="ieee")
        maximum = higher

    place = pair * GROUP + g  # of a query head among all of all rows
    if SPLIT:
        place = place.to(tl.int64) * splits + split
        tl.store(part_ptr + place[:, None] * DIM + d[None, :], acc, mask=real[:, None] & wide[None, :])
        tl.store(stat_ptr + place * 2, maximum, mask=real)
        tl.store(stat_ptr + place * 2 + 1, total, mask=real)
    else:
        out = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row without context answers zeros
        out_at = out_ptr + place.to(tl.int64)[:, None] * DIM + d[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & wide[None, :])


@triton.jit
def merge_kernel(part_ptr, stat_ptr, out_ptr, splits, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """One query head of one row: weighs its splits by exp2(maximum - highest maximum). SPLITS: a power of two >= splits."""
    place = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    there, wide = s < splits, d < DIM
    at = place * splits + s
    maximum = tl.load(stat_ptr + at * 2, mask=there, other=float("-inf"))
    highest = tl.max(maximum, 0)
    weight = tl.exp2(maximum - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight * tl.load(stat_ptr + at * 2 + 1, mask=there, other=0.0), 0)
    part = tl.load(part_ptr + at[:, None] * DIM + d[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + place * DIM + d, out.to(out_ptr.dtype.element_ty), mask=wide)


@lru_cache
def _card(index: int) -> tuple[tuple[int, int], int]:
    """(compute capability, multiprocessors)."""
    facts = torch.cuda.get_device_properties(index)
    return (facts.major, facts.minor), facts.multi_processor_count


def choices(capability: tuple[int, int] | None, dtype: torch.dtype) -> dict[str, Any]:
    """How the kernel is built for a card, or (None) for the interpreter.

    dot: dtype of its products' factors; tile: keys; warps, and split_warps where rows are split; stages: tiles on their way
    while one is worked on. Raises ValueError for a dtype that the card cannot compute.
    """
    if dtype not in DOTS:
        raise ValueError(f"paged_decode takes {', '.join(map(str, DOTS))}, got {dtype}")
    if capability is None:  # its dot takes the bits of bf16 for whole numbers
        dot = tl.float16 if dtype == torch.float16 else tl.float32
        return {"dot": dot, "tile": 64, "warps": 1, "split_warps": 1, "stages": 1}
    if dtype == torch.bfloat16 and capability < (8, 0):
        raise ValueError(f"sm_{capability[0]}{capability[1]} does not compute bf16: keep the model and its cache in fp16")
    # Before sm_80 nothing is copied in the background; data-centre cards of sm_90 and sm_100 have room for a fourth tile.
    stages = 1 if capability < (8, 0) else 4 if capability[0] in (9, 10) else 3
    warps = 2 if capability >= (9, 0) else 4
    return {"dot": DOTS[dtype], "tile": 64, "warps": warps, "split_warps": 4, "stages": stages}


def splits_for(pairs: int, width: int, tile: int, multiprocessors: int) -> int:
    """Splits that give a card work: WAVES programs a multiprocessor, where contexts of up to `width` keys have tiles for
    them. pairs: rows times key heads."""
    return max(1, min(WAVES * multiprocessors // pairs, width // (MIN_TILES * tile), MAX_SPLITS))


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    num_splits: int | None = None,
    window: int = 0,
) -> Tensor:
    """Attention of one query token a row, the last of its context.

    q             [rows, heads, dim]; heads is a multiple of kv_heads, neighbours share keys
    k_cache, v_cache  [block, kv_head, block_size, dim], of q's dtype; any strides with dim innermost
    block_tables  int32 [rows, blocks]; past a row's context it may hold anything
    context_lens  int32 [rows], the new token included; 0 answers zeros
    num_splits    programs that share a row's keys; None: by rows, heads and the card, never by the lengths
    window        only the latest `window` keys; 0: all
    Answers [rows, heads, dim]. Nothing waits for the device. Raises ValueError for a dtype that the card cannot compute.
    """
    rows, heads, dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    if heads % kv_heads or q.dtype != k_cache.dtype or q.stride(2) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        told = f"q {list(q.shape)} {q.dtype}, caches {list(k_cache.shape)} {k_cache.dtype}"
        raise ValueError(f"heads must be a multiple of kv_heads, dtypes equal and dim innermost: {told}")
    capability, multiprocessors = _card(q.device.index) if q.is_cuda else (None, 1)
    built = choices(capability, q.dtype)
    width = triton.next_power_of_2(dim)
    tile = max(16, min(built["tile"], TILE_BYTES // (width * q.element_size())))
    pairs = rows * kv_heads
    splits = num_splits or splits_for(max(pairs, 1), block_tables.shape[1] * block_size, tile, multiprocessors)
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    parts = stats = out
    if splits > 1:
        parts = torch.empty((rows * heads, splits, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((rows * heads, splits, 2), dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    if pairs:
        decode_kernel[pairs, splits](
            q, k_cache, v_cache, block_tables, context_lens, out, parts, stats, scale * LOG2_E, window or 2**31 - 1,
            q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], block_tables.stride(0),
            KV_HEADS=kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DIM=dim, WIDTH=width,
            BLOCK=block_size, TILE=tile, SPLIT=splits > 1, DOT=built["dot"],
            num_warps=built["warps" if splits == 1 else "split_warps"], num_stages=built["stages"],
        )  # fmt: skip
    if pairs and splits > 1:
        spread = triton.next_power_of_2(splits)
        merge_kernel[(rows * heads,)](parts, stats, out, splits, DIM=dim, WIDTH=width, SPLITS=spread, num_warps=4)
    return out
