"""Stage 01: greedy decode, no cache.

A model takes a list of token ids and says, for each position, which token it would put next. That is all it does: it
remembers nothing. To get a text out of it you ask, append the answer, and ask again with the longer list.

What you are given (course/given/torch_model.py; two minutes of reading):

    model(ids)              int64 [batch, tokens] -> logits [batch, tokens, vocabulary]. Row i of the logits is about the
                            token that comes *after* position i, so the next token is in the last row.
    model(ids, last=True)   only that last row: [batch, 1, vocabulary]. The same numbers, cheaper.
    model.eos_ids           a set of ids; each of them ends an answer
    model.device            where `ids` has to be

Run it on a prompt of your own; the ladder model is small, random, and the same on every machine:

    .venv/bin/python -c "from app.s01_naive import *; from course.given.torch_model import load
    print(naive_generate(load(), [5, 6, 7], 8))"
"""

from __future__ import annotations

import torch  # noqa: F401  you will need it
from course.given.torch_model import Model


def naive_generate(model: Model, prompt: list[int], max_tokens: int) -> list[int]:
    """The greedy continuation of `prompt`: at each step the id with the highest logit, found by a pass over the whole
    prefix.

    prompt      at least one id, all below model.vocabulary. It is the caller's: it must be the same list afterwards.
    max_tokens  the most ids to answer, 0 or more. prompt and answer together fit into the model's window.
    Answers the new ids alone, as Python ints, without the prompt. Raises nothing of its own.

    The answer ends with max_tokens ids, or earlier with the first *generated* id that is in model.eos_ids. That id is the
    last one of the answer (the engine does the same: it is a token, somebody paid for it).

    One call of the model per answered id, none after the last. The n-th id of an answer to a prompt of p costs p + n - 1
    positions; that sum is the number that this stage is about.

    Traps:
    - eos_ids is a *set*. A loop that knows one eos writes on past the other.
    - An eos id in the prompt ends nothing: a chat prompt is full of them, one after each turn.
    - Logits of position 0 have the right shape, too, and answer fluent nonsense.
    - `ids = prompt` is not a copy. Whoever appends to it gives the caller a prompt that has grown.
    - Without `torch.inference_mode()` every pass keeps what a gradient would need. Nothing is wrong, only slow and large.
    """
    raise NotImplementedError
