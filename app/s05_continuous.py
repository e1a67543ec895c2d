"""Stage 05: continuous batching. Who is in the batch is decided anew for every token.

A static batch keeps the places of rows that have ended, and whoever waits goes on waiting, until the slowest row is done.
Here the unit of scheduling is the *step*, not the request: in each step every running row gets exactly one id. A row that
has all its ids leaves in that same step; the next step gives its place to whoever waits longest (Orca, Yu et al. 2022).

One step:

    1. admit      while a place is free and somebody waits: the first in the queue becomes a running row. Its prompt is
                  computed, which gives it its first id.
    2. decode     one pass for all rows that were running before: each row's newest id in, its next one out.
    3. leave      rows with their last id are taken out of `running` and answered by step().

With rows that come and go, K and V cannot be one tensor for the batch any more: a row brings its own and takes it away. Keep
K and V per row (a list over the layers of [tokens, kv_heads, dim] is enough). For the decode pass, in each layer: append each
row's new k and v to its own, pad the rows' keys and values to the longest, and call `attend` once for all of them, with a
mask. Padding goes on the right now, past each row's end: nothing is ever read there. The linear layers see one tensor
[rows, 1, hidden]; that they run once a step for all rows is what the gain is made of.

    .venv/bin/python -c "from app.s05_continuous import *; from course.given.torch_model import load
    print(run_all(load(), [([5, 6, 7], 8), ([3, 4], 2), ([9], 5)], max_batch_size=2))"
"""

from __future__ import annotations

import torch  # noqa: F401  you will need it
from course.given.torch_model import Model, attend  # noqa: F401


class Request:
    """One request, from its arrival to its end. Attributes that others read (add what you need, K and V for example):

    id          int, as add_request was given it
    prompt      list[int]
    max_tokens  int
    output      list[int]: the ids generated so far, Python ints
    finished    bool: it has all its ids
    """

    def __init__(self, id: int, prompt: list[int], max_tokens: int):
        raise NotImplementedError


class ContinuousEngine:
    """Requests in, finished requests out, one step at a time.

    waiting    the requests that are not admitted yet, in the order of arrival (a list, or a deque)
    running    the rows of the batch, in the order of admission; never more than max_batch_size
    """

    def __init__(self, model: Model, max_batch_size: int = 8):
        """max_batch_size: rows that may run at once, 1 or more."""
        raise NotImplementedError

    def add_request(self, id: int, prompt: list[int], max_tokens: int) -> None:
        """Queues a request. prompt: at least one id, the caller's; max_tokens: 1 or more. May be called between any two
        steps. Computes nothing."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs. An attribute, without parentheses."""
        raise NotImplementedError

    def step(self) -> list[Request]:
        """One step, as above. Answers the requests that finished in it, [] where none did; each is answered once.

        Afterwards every request that runs, or that finished in this step, has exactly one id more than before. Each answer
        is, id by id, what that prompt would get alone: it ends with its own max_tokens ids, or with the first generated id
        in model.eos_ids (which belongs to it).

        Forward passes (model.counts.passes): one for each request that is admitted, or one for all of them together, as
        you like; and one, [rows, 1], for all rows that decode. None where nobody decodes. A prompt's positions are computed
        once, and each id's once: whoever joins or leaves causes nothing to be computed again, and a place that is free
        does not go through the model as an empty row.

        Traps:
        - Whoever ends in this step leaves in this step. Looked for at the start of the next, each row holds its place for
          one step too long, and its reader waits one step longer.
        - Places that become free in this step are filled in the next one. Filled in this one, they make the step wider than
          the cap.
        - Every row has a position of its own: the number of tokens whose K and V it has. The longest row's, or the number
          of the step, is a position that looks right as long as all came together.
        - A mask that only hides what lies past the *longest* row lets the shorter ones look at padding.
        - `while` a place is free, not `if`.
        - A request that finishes with its first id was never in a decode pass. It leaves in the step that admitted it.
        - A finished request that keeps its K and V keeps its memory, for as long as somebody holds the request.
        """
        raise NotImplementedError


def run_all(model: Model, jobs: list[tuple[list[int], int]], max_batch_size: int = 8) -> list[list[int]]:
    """Runs jobs, (prompt, max_tokens) each, through an engine until none is left. All are there from the start, queued in
    their order. Answers each job's output, in the order of the jobs, not in that of their ends.

    >>> run_all(model, [([5, 6, 7], 8), ([3, 4], 2)], max_batch_size=2)     # lists of 8 and of 2 ids
    """
    raise NotImplementedError
