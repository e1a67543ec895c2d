"""Stage 07, the answer: the engine's own write_kv and paged_attention, and what this stage alone asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from cutaway.backends.torch.attention import paged_attention, write_kv

PAIRS, LEAST = 9, 0.004  # pairs of times, and seconds that each of them takes at least


def slowdown(contiguous: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, block_size: int, *, scale: float) -> float:
    """How many times as long `paged_attention` takes as `contiguous(q, k, v, scale)`, on the same numbers."""
    rows, context, kv_heads, dim = k.shape
    blocks = -(-context // block_size)
    tables = torch.randperm(rows * blocks, device=q.device).view(rows, blocks)
    k_cache, v_cache = (k.new_zeros(rows * blocks, kv_heads, block_size, dim) for _ in range(2))
    at = torch.arange(context, device=q.device)
    slots = tables[:, at // block_size] * block_size + at % block_size
    write_kv(k_cache, v_cache, k.flatten(0, 1), v.flatten(0, 1), slots.flatten())
    contexts = torch.full((rows,), context, dtype=torch.int32, device=q.device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=q.device)

    def paged() -> Tensor:
        return paged_attention(q, k_cache, v_cache, tables.int(), contexts, starts, scale=scale)

    def dense() -> Tensor:
        return contiguous(q, k, v, scale)

    paged(), dense()  # what only a first call pays
    return median(seconds(paged, q.is_cuda) / seconds(dense, q.is_cuda) for _ in range(PAIRS))


def seconds(call: Callable[[], object], on_gpu: bool) -> float:
    """Of one call, as the mean of as many as fill LEAST seconds. On a CPU a neighbour's time does not count; on a GPU a call
    has only been taken note of when it returns."""
    calls, began = 0, now(on_gpu)
    while (taken := now(on_gpu) - began) < LEAST or not calls:
        for _ in range(calls + 1):
            call()
        calls += calls + 1
    return taken / calls


def now(on_gpu: bool) -> float:
    if not on_gpu:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
