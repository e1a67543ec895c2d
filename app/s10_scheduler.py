"""Stage 10: waiting, running, preempted. Who runs in the next step, and with which memory.

Memory ends and requests do not. Sequences grow by a token a step, so rows that fitted when they
were admitted will not fit for ever: somebody has to give blocks back, wait, and come back later
without the person behind it noticing more than a pause. You write the policy. The engine around it
does the rest: it makes a plan of what you decide, sends it to the model, brings the sampled tokens
back, and copies blocks to the host and back where `--preemption swap` asks for it.


One idea: a request catches up
------------------------------
Of the tokens that a request knows, some are *computed* (their keys and values are in its blocks, or
will be by a step that is already on its way). The rest is *pending*, and each step computes some of
it. A new prompt of 100 tokens has 100 pending. A decode has 1. A request that was preempted with
130 tokens has 130. A prompt of which a slice of 64 was computed has 36. There is no prefill mode
and no decode mode, and nothing to switch between them: only these numbers.


The fields of a `Request` (cutaway.core.request) that you use
-------------------------------------------------------------
  id, params.max_tokens, stop_ids   as they came; never change them
  tokens          the prompt, then every token of the answer. You append to it, in `apply` alone,
                  and never take away
  num_prompt      length of the prompt
  max_total       num_prompt + max_tokens: the most tokens it can ever have
  table           its page table (stage 06), empty when you get it: `blocks`, `missing(num_tokens)`,
                  `extend(ids)`
  hashes          one a full block of `tokens`; the engine extends it after each `apply`. May be
                  empty: no prefix cache
  computed        tokens computed or on their way. Yours: it advances in `schedule`, not when the
                  result is back
  in_flight       tokens being sampled by steps that have not come back. Yours
  known           len(tokens) + in_flight         (follows by itself)
  pending         known - computed                (follows by itself)
  sent            a deque: how many tokens each step in flight computes for it, oldest first. Yours
  kept            tokens whose keys and values the engine holds on the host for its return; 0 unless
                  it swaps. Only read it
  num_cached      prompt tokens that `lookup` found at its last admission: min(hits * block_size,
                  num_prompt). You set it
  num_published   blocks of its table that the cache has: those that `lookup` found, then those that
                  you published. The engine does not look for changes in blocks before it, and
                  writes kept blocks back from there on. You set it
  preemptions     how often it was preempted. You count it
  finish_reason   FinishReason.STOP or .LENGTH, set once, in `apply`

Known tokens count those in flight because steps overlap: with depth 1 the engine schedules the
next step before this one is back. Its newest token has no value on this side yet, but it has a
position, and that is all you need in order to schedule it.

`Limits`     rows (requests at once), budget (tokens a step), chunk (most tokens of one row a step),
             window (most tokens of a sequence), block_size
`Schedule`   rows [(request, first position, number of tokens)], admitted [request], preempted
             [request], copies [(from block, to block)]; all lists, empty when made


What the cache (stage 09) offers; you speak to nothing below it
---------------------------------------------------------------
  num_free              blocks that `allocate` could give now, cached ones that nobody holds
                        included
  lookup(hashes)        blocks of the longest cached beginning. You *hold* each from then on: keep
                        them or release them
  allocate(n)           n blocks, or OutOfBlocks; compare with num_free before, then it does not
                        come to that
  publish(block, hash)  for a full block whose tokens are *computed*. Answers the block that stands
                        for the hash from now on, which may be another (somebody else computed the
                        same): put it into the table in place of yours. Your hold has moved to it
                        then, so your own block is not yours to release
  release(ids)          you hold them no more. Last block first: then the cache evicts ends before
                        the beginnings they need
  prepare_write(block)  (block to write, block to copy from or None), before a row writes into a
                        block that it may share and that is full in part. Requests share full blocks
                        alone, so today nothing needs it, nor `copies`

Traps, by name. The first three give text that looks right
----------------------------------------------------------
  forgotten answer   a preempted request starts again from its prompt. Greedy text comes out the
                     same, so nobody notices until somebody streams: the reader gets the beginning
                     twice; with a temperature, another answer
  early publishing   a block is published when it is scheduled. Mostly the step is done before
                     anyone hits it. After an abort it never is, and a stranger's answer is made
                     from what the memory held before
  lost reference     `publish` answers another block and the table keeps its own. The content is
                     equal, the ids are right; the counts are not: one day a block is given away
                     while somebody reads it
  one past the end   nothing stops a row whose last token is in flight: a position more is computed,
                     and thrown away
  tight entry        a request enters because its prompt just fits. Its first decode needs a block;
                     it is the last one admitted; it is out again, and all its prefill with it. Next
                     step, once more
  eternal queue      a request as large as the pool asks for room for one token more than it will
                     ever compute
  the small one      a short request passes a long one at the head that has to wait for room. More
                     come. The long one never runs
  wrong victim       the oldest gives way because it is the largest, or stands first. Then nobody is
                     sure to end. With the last admitted as victim the oldest always comes on, and
                     each becomes the oldest in turn
  vain lookup        the head of the queue is tried in every step, does not fit, and each time holds
                     its hits once more
  double budget      admissions get the budget again, after the running rows have had theirs
  own tokens         the last row needs a block while its token is in flight, and preempts itself:
                     that token is lost, and is sampled again on its return
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cutaway.core.plan import Limits, Schedule
from cutaway.core.request import DoesNotFit, FinishReason, Request  # noqa: F401  (you will need them)

Split = Callable[[Sequence[int], int, int], list[int]]


def whole_or_nothing(pending: Sequence[int], budget: int, chunk: int) -> list[int]:
    """How many of its pending tokens each row computes in this step: all, or 0 where the budget no
    longer holds them.

    Rows are served in order; one that gets 0 does not keep a later, smaller one from its tokens.
    `chunk` is not used: stage 11 writes a better function with these arguments, and the scheduler
    takes either.

    >>> whole_or_nothing([20, 4, 5], budget=10, chunk=512)
    [0, 4, 5]
    """
    raise NotImplementedError


class Scheduler:
    """Policy alone. `waiting` and `running` hold Requests in the order of arrival; the engine reads
    both, and their lengths. Each may be a list or a deque.

    cache    a PrefixCache (stage 09) with every block free: its `num_free` now is the size of the
             pool
    limits   cutaway.core.plan.Limits
    split    (pending tokens of each row, budget, chunk) -> tokens of each row. The only thing that
             decides how many tokens a row computes, for running rows and at admission: ask it, and
             do not cut or round what it answers

    Two requests in a pool for one and a half (this runs as it stands):

    >>> from cutaway.core.blocks import BlockAllocator, BlockTable
    >>> from cutaway.core.prefix_cache import PrefixCache
    >>> from cutaway.core.request import SamplingParams
    >>> cache = PrefixCache(BlockAllocator(5, 4))  # 4 blocks of 4 tokens, and the dummy block
    >>> scheduler = Scheduler(cache, Limits(rows=4, budget=64, window=100, block_size=4))
    >>> for id in (0, 1):
    ...     scheduler.add(Request(id, [5] * 7, SamplingParams(max_tokens=5), table=BlockTable(4)))
    >>> for _ in range(6):
    ...     step = scheduler.schedule()
    ...     finished = scheduler.apply([(request, [9]) for request, start, n in step.rows])
    ...     rows = [(request.id, start, n) for request, start, n in step.rows]
    ...     print(rows, [r.id for r in step.preempted], [r.id for r in finished])
    [(0, 0, 7), (1, 0, 7)] [] []
    [(0, 7, 1), (1, 7, 1)] [] []
    [(0, 8, 1)] [1] []
    [(0, 9, 1)] [] []
    [(0, 10, 1)] [] [0]
    [(1, 0, 9)] [] []

    In the third step the first request writes position 8 and needs a third block. There is none, so
    the other gives way. It keeps its 9 tokens, two of them already shown to somebody, and computes
    their keys and values anew when it returns.
    """

    def __init__(self, cache: Any, limits: Limits, split: Split = whole_or_nothing):
        self.waiting: Sequence[Request]
        self.running: Sequence[Request]
        raise NotImplementedError

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue, or raises DoesNotFit and leaves it out.

        It is refused if it could never run to its end, even alone: its `max_total` is over the
        window; or max_total - 1 tokens (the last token is emitted and never computed) need more
        blocks than the pool has; or `split` gives it 0 of a whole, empty budget when max_total - 1
        tokens are pending (it may come back with that many after a preemption). Otherwise it is
        taken, however full the pool is now. DoesNotFit takes one string, which names the figures:
        prompt tokens, tokens to generate, blocks needed, blocks in the pool.
        """
        raise NotImplementedError

    def abort(self, id: int) -> None:
        """Forgets the request with this id, running or waiting, in the middle of a prompt or with
        steps in flight; its blocks are free when this returns. An id that is not here (any more) is
        nothing. Its results that are still on their way never reach you: the engine drops them, as
        it does after a preemption."""
        raise NotImplementedError

    def schedule(self) -> Schedule:
        """Decides one step. In this order:

        1. `split` is asked once for all running rows. A row that knows `max_total` tokens has
           nothing pending: what is missing is only on its way back. A row that gets 0 is passed
           over; those behind it go on.
        2. For each running row with tokens, in order: it needs blocks for `computed` plus these
           tokens. While the cache has too few, the row *admitted last* is preempted. If that is the
           row itself: with `in_flight` > 0 it stays, does nothing in this step, and waits for those
           tokens; with 0 it is preempted as any other. In both cases the step ends here. Rows behind it
           that were preempted are passed over, of course.
        3. If memory was short, nobody enters. Otherwise, while there is budget left and a row free,
           the *head* of the queue may enter; if it cannot, nobody else does. It enters if
           `split([pending], budget left, chunk)` gives it tokens and the cache has blocks for all
           that it knows *and one token more* (but never more than max_total - 1 tokens).

        Preempting: the blocks go back, `computed`, `in_flight` and `num_published` to 0, `sent` is
        emptied, `preemptions` goes up; the tokens stay. It goes to the *head* of the queue, and
        into `preempted`.

        Entering: first `lookup`, with the hashes of at most (known - 1) // block_size blocks, so
        that one token is left to compute: without one there are no logits to sample from. Then
        computed = hits * block_size; or `kept`, if that is more (at most known - 1). Pending
        follows from it. Allocate *all* these blocks at once, for what it knows and one more; set
        `num_cached` and `num_published`. If it cannot enter, release what lookup gave and set
        computed back to 0.

        Every row of the step, new or old: `computed` goes up by n, n is appended to `sent`; if
        computed has now reached `known`, the row samples a token, so in_flight goes up by 1. `rows`
        gets (request, computed before, n).

        The engine relies on: rows without zeros, none twice; their tables long enough already;
        every request in `admitted` is among the rows; nobody is admitted and preempted in one step;
        an empty step only where results are in flight or nobody is left.
        """
        raise NotImplementedError

    def apply(self, done: Sequence[tuple[Request, list[int]]]) -> list[Request]:
        """Takes the results of the *oldest* step in flight and answers those requests that finished
        with it.

        done   (request, new tokens) of each row of that step that still counts; [] for a row that
               did not sample (a slice of a prompt). All of them are in `running`.

        For each: the oldest entry of `sent` is taken off; in_flight goes down by the number of new
        tokens; they are appended to `tokens`, up to the one that ends it: an id of `stop_ids`
        (which is the last token of the answer: STOP), or the one that makes `max_total` (LENGTH); a
        token that is both is STOP. What stands behind it is dropped. (A step brings at most one
        token a row today; one that guesses ahead would bring more.) Then its blocks that are full
        and computed are published: computed tokens that are *back* are computed - sum(sent); a
        block needs a hash, and none is published twice. A finished request leaves `running` and
        gives all its blocks back.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Given: asserts what must hold after every call. Use it in your own experiments;
        `CUTAWAY_DEBUG=1` does, too."""
        self._check_memory()
        for r in self.running:
            assert 0 < r.computed <= r.known <= r.max_total, f"request {r.id}: computed {r.computed}, known {r.known}"
            assert r.in_flight >= 0 and sum(r.sent) <= r.computed, f"request {r.id}: {r.in_flight} in flight, sent {r.sent}"

    def _check_memory(self) -> None:
        for r in self.running:
            assert r.table is not None and not r.table.missing(r.computed), f"request {r.id}: its table is too short"
        for r in self.waiting:
            assert r.table is not None and not r.table.blocks, f"request {r.id} waits with blocks"
            assert not (r.computed or r.in_flight or r.sent), f"request {r.id} waits, and something of it is computed"
