"""Stage 11: chunked prefill. Who gets how much of a step's token budget.

A step computes tokens of several requests in one forward pass. A request that decodes has one token
to compute; a prompt has as many as it is long, and a step that computes 5,000 of them takes as long
as ten steps of 512. While it lasts, every decoding request waits for its next token. So a step gets
a *budget* of tokens, and a prompt is computed in slices that fit what the decodes have left of it
(Sarathi-Serve, Agrawal et al. 2024). Nothing else changes: a slice needs no state of its own,
because the scheduler counts what a request has computed so far (stage 10), and what is left is
simply still pending.

You write one function. The scheduler calls it in three places:
  - each step, with all running rows: who computes how many tokens;
  - then for the head of the queue, alone: `split([pending], what is left of the budget, chunk)`;
  - when a request arrives, alone: if it gets 0 of a whole, empty budget, the request can never run
    and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence


def split(pending: Sequence[int], budget: int, chunk: int) -> list[int]:
    """Tokens to compute in this step for each row.

    pending   tokens that each row has to compute, in the order in which the rows were admitted. 1
              is a decode (or the end of a prompt, which is the same thing here); more is a prompt;
              0 is a row whose newest token is still in flight. May be empty. Not to be changed.
    budget    most tokens of the step, all rows together. 0 or more; may be less than the number of
              decodes.
    chunk     most tokens of one row; 1 or more.

    Answers a list of ints, one for each row, in the order of `pending`, such that
      - together they are at most `budget`;
      - none is more than its row has pending, nor more than `chunk`, nor negative; a row with 0
        gets 0;
      - rows with exactly one pending token are served before all others, wherever they stand, while
        there is budget;
      - what is left goes to the others, the earliest row first: each takes as much as it may before
        the next gets anything;
      - nothing is left over that a row could have taken.

    >>> split([100, 1, 1], budget=10, chunk=100)
    [8, 1, 1]
    >>> split([100, 1, 50], budget=20, chunk=12)
    [12, 1, 7]
    >>> split([5, 0, 1], budget=1, chunk=4)
    [0, 0, 1]

    Traps:
      budget of rows     the budget counts tokens. A loop that takes one off for each row never
                         notices.
      second helping     slices are cut from what the decodes *left*. With the whole budget for
                         each, every step is over it, and all that shows is that the gaps are a
                         little longer than they should be.
      order of answers   decodes are served first but do not stand first: a row keeps its place in
                         the list.
      fair shares        an equal part for each prompt looks just. All prompts then end at the same,
                         late moment, and parts that a short row does not need are lost.
      round numbers      slices in multiples of the block size leave the last few tokens of a prompt
                         pending for ever.
      a token for free   a row with 0 pending has nothing to compute: its token is not known yet.
                         Giving it one computes a position past its end. The ids stay right, so only
                         counting shows it.
    """
    raise NotImplementedError
