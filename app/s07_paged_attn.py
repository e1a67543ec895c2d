"""Stage 07: attention through the page table.

Your allocator of stage 06 hands out blocks wherever it has them. So the keys of a request no longer lie in a row: they lie
in blocks of 16 tokens, scattered over one pool that all requests share, and only the request's block table knows the order.
This file writes keys and values into that pool, and attends to them through the table.

    k_cache, v_cache    [block, kv_head, block_size, dim]     the pool, one pair for each layer
    block table         of a row: the ids of its blocks, in the order of its tokens
    slot                block * block_size + offset: where one token's keys are, as one number

Token i of a row is at offset i % block_size of the block that stands at i // block_size in its table.

A step of the engine mixes rows of every kind. A row is a request's *context* (all its tokens whose keys are in the cache)
and its *queries*, which are the last n tokens of that context. n = 1 is decode, n = all of them is a whole prompt, anything
between is a chunk of a prompt. All rows' queries stand one after another in one tensor, with no padding: `query_starts` says
where each row's begin.

Run it on something small (blocks 3 and 1 hold one row of 6 tokens, blocks of 4):

    .venv/bin/python -c "import torch; from app.s07_paged_attn import *
    k, v, kc, vc = torch.randn(6, 1, 8), torch.randn(6, 1, 8), torch.zeros(5, 1, 4, 8), torch.zeros(5, 1, 4, 8)
    write_kv(kc, vc, k, v, torch.tensor([12, 13, 14, 15, 4, 5]))
    print(paged_attention(torch.randn(1, 2, 8), kc, vc, torch.tensor([[3, 1]], dtype=torch.int32),
          torch.tensor([6], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), scale=8**-0.5).shape)"
"""

from __future__ import annotations

from collections.abc import Callable

import torch  # noqa: F401  you will need it
import torch.nn.functional as F  # noqa: F401  F.scaled_dot_product_attention is allowed: this stage is about where keys are
from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Writes the keys and values of new tokens into their slots. Answers nothing: the caches that come in are changed.

    k_cache, v_cache  [block, kv_head, block_size, dim]
    k, v              [tokens, kv_heads, dim]
    slots             int32 or int64 [tokens], each from 0 to blocks * block_size - 1, no two the same, in any order

    Token i goes to block slots[i] // block_size, offset slots[i] % block_size, all its heads. Everything else stays as it is.

    Traps:
    - The head stands *between* block and offset. `cache.view(-1, kv_heads, dim)[slots] = k` runs, and scatters the heads of
      one token over the tokens of another.
    - `cache.reshape(...)`, `.flatten(...)` and indexing with a tensor may be copies: what is written to a copy is lost.
    """
    raise NotImplementedError


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
) -> Tensor:
    """softmax(q k^T * scale) v of every row's queries over that row's context, causal.

    q                 [tokens, heads, dim]: the queries of all rows, one row after another
    k_cache, v_cache  [block, kv_head, block_size, dim], of q's dtype
    block_tables      int32 [rows, blocks]. The first ceil(context / block_size) ids of a row are its blocks. What stands
                      after them is left over from somebody else: a valid id, and none of your business.
    context_lens      int32 [rows]: tokens of each row's context, its queries' own included; at least 1. The keys of the
                      queries' own tokens are in the cache already.
    query_starts      int32 [rows + 1]: row r owns q[query_starts[r] : query_starts[r + 1]], and they are the *last* tokens
                      of its context: with n queries on a context of c, the first of them is token c - n
    Answers a new tensor [tokens, heads, dim] of q's dtype. All tensors are on one device; put new ones there, too.

    Each query sees the tokens up to and including its own. With h heads on k key heads, head i uses key head i // (h // k).

    A sketch: for each row, take its blocks out of the pool, bring them into order as [kv_heads, context, dim], cut at the
    context, and attend. A loop over rows is all right here. Be right first: stage 08 is about being fast.

    Traps, all of which give finite numbers of the right shape:
    - A context of 32 has two blocks of 16, one of 33 has three. `// 16 + 1` reads a block that is not the
      row's, which is harmless only if you cut at the context afterwards.
    - Cut what lies past the context *off*. A mask gives it weight 0, and 0 times the NaN that the last owner left is NaN.
    - A chunk's mask is not the lower triangle from the first key on: its queries begin at c - n.
    - `k.repeat(group, 1, 1)` puts key heads in turn (0 1 0 1). They go side by side (0 0 1 1): repeat_interleave.
    - Gathering the whole width of the table, or touching the whole pool, is right, and its cost grows with what *others*
      hold. The work follows the row's own context.
    - `out = q` writes the answer into the queries, which the caller may still need.
    - 1 / sqrt(dim) is not always the scale.
    """
    raise NotImplementedError


def slowdown(contiguous: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, block_size: int, *, scale: float) -> float:
    """What the page table costs: how many times as long your `paged_attention` takes as attention over keys in a row.

    contiguous  given: contiguous(q, k, v, scale) answers [rows, heads, dim]; k and v are just as they come in here
    q           [rows, heads, dim]: one query a row
    k, v        [rows, context, kv_heads, dim]: as many tokens in every row
    Answers time of paged_attention / time of contiguous, as a float. The checks time both as well; you are right if you are
    within 25% of them.

    Lay k and v out in a pool of your own first (`write_kv`, blocks in shuffled order, tables, context_lens, query_starts),
    and check once that both sides give the same numbers: two sides that compute different things have no ratio.

    How to time, so that two people agree:
    - what happens once (laying out, the first call) is before the clock; what happens in every step (the gather) is inside
    - one call is too short: time enough of them to fill some milliseconds
    - take turns: paged, contiguous, paged, contiguous …; one ratio for each pair, and the median of the ratios
    - on a CPU time.process_time(), which a busy neighbour does not move; on a GPU torch.cuda.synchronize() before each
      look at time.perf_counter(): a call returns when its work has been noted down, not when it is done
    """
    raise NotImplementedError
