"""Stage 08: decode attention through the page table, as one kernel.

Stage 07 copies the keys together and then reads the copy. This one never copies: a program looks each key's block up in the
table, reads it where it lies, and folds it into a running softmax. Each key is read once, and no row of scores is ever
stored. Only decode is asked for: one query a row.

In Triton you write what one *program* does to whole tiles of numbers; a launch runs as many programs as its grid says. On a
machine without a GPU the runner switches Triton's interpreter on (TRITON_INTERPRET=1, before triton is imported), which runs
one program after the other in NumPy: slow, and the same numbers. So everything but the speed can be checked anywhere, and
print() works in a kernel. Two things the interpreter is strict or odd about: an address outside of your tensors is an error
there (on a GPU it may go unnoticed), and its tl.dot does not know bf16, which the checks therefore do not ask for.

The running softmax, over tiles of keys, for one query. m is the highest score so far, s the sum of weights, o the output so
far, all fp32:

    m, s, o = -inf, 0, 0
    for each tile:   higher = max(m, max(scores));  w = exp(scores - higher);  shrink = exp(m - higher)
                     s = s * shrink + sum(w);       o = o * shrink + w @ values;     m = higher
    output = o / s

exp(x) is exp2(x * log2(e)), and exp2 is the one that a GPU has: put log2(e) = 1.4426950408889634 into the scale.

Splits: with few rows there are few programs, and most of the card waits. So a row's keys can be split; each split leaves its
m, s and o, and a second small kernel merges them: M = max of all m, each split weighs exp(m - M). A split may have no keys at
all (more splits than tiles): its m is -inf, its s is 0, and it must weigh nothing.

Worth knowing, if Triton is new to you:
    tl.program_id(axis), tl.arange(0, n)      n must be a power of two and a constant (tl.constexpr)
    tl.load(pointer + offsets, mask=..., other=0.0); tl.store(pointer + offsets, values, mask=...)
    tl.dot(a, b)        [m, k] x [k, n], sums in fp32; m, n and k at least 16. So the query heads of a group are padded to 16
                        rows. For fp32 say input_precision="ieee": otherwise a GPU rounds to 10 bits first.
    kernel[(programs, splits)](tensor, ..., SIZE=16, num_warps=4)      tensors arrive as pointers to their first element

Run it on something small, once it is written (32 tokens in blocks 2 and 1):

    TRITON_INTERPRET=1 .venv/bin/python -c "import torch; from app.s08_paged_triton import paged_decode
    k, v, table = torch.randn(3, 2, 16, 64), torch.randn(3, 2, 16, 64), torch.tensor([[2, 1]], dtype=torch.int32)
    print(paged_decode(torch.randn(1, 4, 64), k, v, table, torch.tensor([32], dtype=torch.int32), scale=0.125).shape)"
"""

from __future__ import annotations

import torch  # noqa: F401  you will need it
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def decode_kernel(q_ptr, out_ptr, DIM: tl.constexpr):
    """Yours: its arguments, its grid and its name are nobody's business but your own. One program takes one row, one key head
    and one split of the row's keys, with all query heads that share the key head."""


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    num_splits: int | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v of one query a row over that row's paged context.

    q             [rows, heads, dim], fp32 or fp16. Head i uses key head i // (heads // kv_heads).
    k_cache, v_cache  [block, kv_head, block_size, dim], of q's dtype. dim is innermost (stride 1); the other three strides
                  are what .stride() says: the caches may be views, and the two need not have the same strides
    block_tables  int32 [rows, blocks]: the first ceil(context / block_size) ids of a row are its blocks, in order. What
                  stands after them is left over, and so is what the blocks hold past the context: NaN, for example.
    context_lens  int32 [rows], at least 1, of any length. They are on the device: reading one in Python would wait for it.
    num_splits    programs that share the keys of a row and key head. None: your choice, from numbers that the host knows
                  (rows, heads, multiprocessors of the card), so that the same step always gives the same bits.
    Answers a new tensor [rows, heads, dim] of q's dtype. One launch, or two where rows are split.

    Any group size, any dim that is a multiple of 16 up to 256 (64, 80, 96, 128 …), blocks of 1, 4 and 16.

    Traps, most of which give finite numbers of the right shape:
    - A tile is not a block. With 64 keys a tile and 16 a block there are four blocks in it: one id for each *token*.
    - Keys past the context need a score of -inf. Loading them as 0 gives a score of 0, which is a score like any other.
    - Values past the context must not be loaded at all (mask, other=0): a weight of 0 does not silence a NaN.
    - When the maximum rises, the sum *and* the output so far shrink.
    - exp(-inf - -inf) is NaN. It comes up where a program has no keys.
    - dim 80 takes 128 lanes, of which 48 must neither read nor write.
    - The rows that pad a group to 16 must not be stored: they are other heads' places.
    - A program for each query head is right, and reads every key as often as heads share it.
    - block * stride is more than 32 bits hold in a large pool: make the block's id int64 first. No
      check can see this one: it takes a pool of gigabytes.
    - What a loop carries keeps its dtype and shape: a GPU insists on it, the interpreter does not. Begin o in fp32.
    - Sums in fp16 are wrong from about a thousand keys on.

    On a GPU the gates are three times the speed of stage 07 and half of the rate at which the card was just measured to read
    its memory. Tiles of 64 keys, 2 to 4 warps and a few stages are a good place to begin. A T4 (sm_75) computes fp16 and
    fp32, no bf16.
    """
    raise NotImplementedError
