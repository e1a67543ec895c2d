"""Stage 04: static batching. Several prompts go through the model as the rows of one batch.

A decode step reads every weight of the model to make one token. It reads the same weights once to make eight, one for each
row of a batch. So put the prompts into one tensor and generate for all of them together.

A tensor is a rectangle and prompts are not. They are padded to the longest, here on the *left*, so that the newest token of
every row is in the last column, and each new token is one more column for all:

    prompt 0    [ 5  6  7  8  9]        columns       0  1  2  3  4
    prompt 1    [ .  .  .  3  4]        positions     0  0  0  0  1     a row counts from its own first token
    prompt 2    [ .  .  7  7  2]        its mask      .  .  .  x  x     nobody looks at the padding

You own what is between the tokens: positions, mask, and the cache of K and V, now [rows, columns, kv_heads, dim] a layer.
What you are given is in course/given/torch_model.py (embed, layer.qkv, attend, layer.finish, logits). The batch is *static*:
it starts with all its rows and keeps them until the last one has ended. That is this stage's gain, and its bill.

    .venv/bin/python -c "from app.s04_static_batch import *; from course.given.torch_model import load
    print(static_batch_generate(load(), [[5, 6, 7, 8, 9], [3, 4]], [8, 3]), padding_waste([8, 3]))"
"""

from __future__ import annotations

from collections.abc import Sequence

import torch  # noqa: F401  you will need it
from course.given.torch_model import Model, attend  # noqa: F401


def static_batch_generate(model: Model, prompts: list[list[int]], max_tokens: list[int] | int) -> list[list[int]]:
    """The greedy answer to each prompt, all computed as the rows of one batch.

    prompts     any number of rows; each has at least one id. The caller's: unchanged afterwards.
    max_tokens  the most ids to answer, 0 or more: one number for all rows, or a list with one a row.
    Answers a list of Python ints for each prompt, in their order; no prompts: []. Raises nothing of its own.

    Each answer is, id by id, what that prompt would get alone (stage 02). It ends with its *own* max_tokens ids, or with
    the first generated id that is in model.eos_ids (which belongs to it).

    Passes: the first computes all prompts and gives every row its first id; each later one computes one column, [rows, 1].
    A row that has ended stays in the batch; what is computed for it is thrown away. After the pass in which the last row
    ends there is none. So there are as many passes as the longest answer has ids, and rows x passes places for an id.

    Masks: attend takes bool [rows, queries, keys], True where a query may look. In the first pass a token looks at the
    tokens of its own row up to itself, never at padding. Later, the newest token looks at everything but padding.

    Traps:
    - Padding that is seen changes every id after it, a little, or much. Nothing crashes. It has to be masked in the first
      pass *and* in all later ones: its K and V stay in the cache.
    - Padded on the right, a short row's last column is padding. Read the logits there and you get a fluent continuation
      of the padding: it looks like text. (It can be done, with a column of its own for each row. On the other track it is.)
    - Positions count from a row's own first token, and go on from its own last one. `torch.arange(columns)` for all rows
      shifts short rows; mixing the two, shifted in one pass and not in the next, tears a hole into the row.
    - Positions must be at least 0, also those of padding, whatever they are there.
    - A query on padding whose mask allows no key at all has nothing to average over, which is NaN or whatever the library
      makes of it. Let it see itself. Nobody reads what comes out, but a NaN times a weight of 0 is a NaN.
    - A row that has ended goes on producing ids. They are not part of its answer.
    """
    raise NotImplementedError


def padding_waste(lengths: Sequence[int]) -> float:
    """The share of a static batch's places whose id nobody wanted, 0 to 1.

    lengths   ids in each row's answer, 0 or more.
    The batch has len(lengths) x max(lengths) places, of which sum(lengths) hold an id that somebody gets. No rows, or
    nothing but empty ones, waste nothing: 0.0.

    >>> padding_waste([1, 3])       # 2 of 6 places
    0.3333333333333333
    """
    raise NotImplementedError
