"""Paged attention by gathering (stage 07): the oracle of every kernel.

Keys and values of a sequence lie in blocks scattered over the pool; its block table says where. `write_kv` puts new
tokens into their slots; `paged_attention` gathers each row's blocks into one run and attends to it. A row is `n` query
tokens, the last of its context: n = 1 is decode, n = the prompt is prefill, anything else a chunk or drafts to verify.

Invariants: a query at position p sees exactly the keys at positions <= p (and > p - window); what lies in a block past
the context, NaN included, never reaches the output.

What the engine runs on a CPU is the same with a `plan` for all layers of a step (`gather.py`), which is faster where there are
many rows. The idea of the page table is PagedAttention's (Kwon et al. 2023).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

SUPPORTS = frozenset({"sliding_window", "plan", "head_first"})


class StepPlan(Protocol):
    """A step's writes and rows, prepared for all layers: `gather.Plan`."""

    def write(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None: ...
    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int) -> Tensor: ...


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, *, plan: StepPlan | None = None) -> None:
    """Writes k and v [tokens, kv_heads, dim] to `slots` [tokens] (block * block_size + offset) of the caches
    [block, kv_head, block_size, dim], in place."""
    if plan is not None:
        return plan.write(k_cache, v_cache, k, v)
    block_size = k_cache.shape[2]
    block, offset = slots.long() // block_size, slots.long() % block_size
    k_cache[block, :, offset] = k
    v_cache[block, :, offset] = v


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int = 0,
    plan: StepPlan | None = None,
) -> Tensor:
    """Causal attention of ragged rows over their paged contexts.

    q             [tokens, heads, dim]; heads is a multiple of kv_heads, and heads h and h + 1 of one group share keys
    k_cache, v_cache  [block, kv_head, block_size, dim]
    block_tables  int32 [rows, blocks]; context_lens int32 [rows]: keys of each row, its queries' own included
    query_starts  int32 [rows + 1]: row r owns queries query_starts[r] to query_starts[r + 1], the last of its context
    window        a query sees only the latest `window` keys, its own included; 0: all
    Answers [tokens, heads, dim].
    """
    if plan is not None:
        return plan.attend(q, k_cache, v_cache, scale, window)
    out = torch.empty_like(q)
    for row, (start, stop) in enumerate(pairwise(query_starts.tolist())):
        context = int(context_lens[row])
        k = gather(k_cache, block_tables[row], context)
        v = gather(v_cache, block_tables[row], context)
        group = q.shape[1] // k.shape[0]  # query heads that share a key head
        keys = torch.arange(context, device=q.device)
        positions = keys[context - (stop - start) :, None]  # of the row's queries
        seen = (keys <= positions) & (keys > positions - window) if window else keys <= positions
        queries = q[start:stop].transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            queries, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), attn_mask=seen, scale=scale
        )
        out[start:stop] = attended.transpose(0, 1)
    return out


def gather(cache: Tensor, table: Tensor, context: int) -> Tensor:
    """The first `context` keys or values of a row: [kv_heads, context, dim]."""
    blocks = -(-context // cache.shape[2])
    return cache[table[:blocks].long()].transpose(0, 1).flatten(1, 2)[:, :context]
