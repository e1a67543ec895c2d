"""Single rules of the scheduler, each shown in a few calls of it without an engine. Each says itself what has gone wrong."""

from __future__ import annotations

from course.runner.checking import Lab
from course.stages.s10_scheduler.helpers import Desk

from cutaway.core.plan import Schedule
from cutaway.core.request import FinishReason, Request


def blocks(request: Request) -> list[int]:
    assert request.table is not None
    return request.table.blocks


def ids(step: Schedule) -> list[int]:
    return [r.id for r, _, _ in step.rows]


def waits_for_own_token(lab: Lab) -> None:
    """Two rows fill the pool. The last needs a block while its token is in flight; then once more, with all of them back."""
    desk = Desk(lab, usable=4)
    first, last = desk.add(5, 3), desk.add(7, 5)
    desk.apply(desk.scheduler.schedule())
    flying = desk.scheduler.schedule()  # position 7 of the last, which fills its second block
    step = desk.scheduler.schedule()  # position 8
    lab.equal(([r.id for r in step.preempted], ids(step)), ([], [first.id]), "preempted, and rows, of the step after it",
              "the last row is preempted with its own token in flight, which is lost: it has to wait for it")  # fmt: skip
    lab.equal((last.in_flight, len(blocks(last))), (1, 2), "tokens in flight and blocks of the row that waits")
    desk.apply(flying)
    desk.apply(step)  # with which the first one ends
    lab.equal([(r.id, start, n) for r, start, n in desk.scheduler.schedule().rows], [(last.id, 8, 1)],
              "rows, once there is room for the row that waited",
              "a row that waits for its own token keeps its blocks, and goes on where it was")  # fmt: skip


def zero_is_one_rows_own(lab: Lab) -> None:
    """A row that gets 0 tokens, in front of others that get some: by `split`, and because it has all that was asked for."""
    told = "a row that gets 0 tokens in a step ends the step for all rows behind it: it is passed over, and they go on"
    desk = Desk(lab, usable=30, share=lambda pending, budget, chunk: [0, *pending[1:]] if len(pending) > 1 else [*pending])
    for _ in range(3):
        desk.add(3, 5)
    desk.step()
    lab.equal(ids(desk.scheduler.schedule()), [1, 2], "rows where split([1, 1, 1], ...) answers [0, 1, 1]", told)
    desk = Desk(lab, usable=30)
    for most in (1, 3):
        desk.add(5, most)
    desk.scheduler.schedule()
    lab.equal(ids(desk.scheduler.schedule()), [1], "rows, the first request's last token being in flight", told)


def gives_back_last_block_first(lab: Lab) -> None:
    """The order of blocks as a request ends, is aborted, is preempted."""

    def judge(desk: Desk, held: list[int], way: str) -> None:
        lab.equal(desk.released, held[::-1], f"blocks given back where a request {way} that holds {held}, in order",
                  "blocks are given back the first one first: the cache then evicts beginnings before their ends")  # fmt: skip

    desk = Desk(lab, publish=True)
    ends = desk.add(11, 1)
    step = desk.scheduler.schedule()
    held = [*blocks(ends)]
    desk.apply(step)
    judge(desk, held, "ends")
    desk = Desk(lab, publish=True)
    gone = desk.add(11, 6)
    desk.step()
    held = [*blocks(gone)]
    desk.scheduler.abort(gone.id)
    judge(desk, held, "is aborted")
    desk = Desk(lab, usable=4, publish=True)
    _, last = desk.add(7, 6), desk.add(6, 6)
    desk.step()
    desk.step()
    held = [*blocks(last)]
    step = desk.scheduler.schedule()  # the first writes position 8
    lab.equal([r.id for r in step.preempted], [last.id], "preempted, as the first of two crosses into a new block")
    judge(desk, held, "is preempted")
    forgot = desk.scheduler.decisions[-1].forgot
    lab.expect(not forgot, "preempted: computed, in_flight and num_published are 0, the tokens stay", "".join(forgot))


def stop_ids_end_an_answer(lab: Lab) -> None:
    """A stop id as the last token that is allowed; and one with another token behind it, in the same results."""
    desk = Desk(lab)
    last = desk.add(5, 1, stop_ids=[7])
    desk.step()
    lab.equal(last.finish_reason, FinishReason.STOP, "finish_reason, the last token allowed being a stop id",
              "a stop id that is also the last token allowed is STOP: look for it before the length")  # fmt: skip
    several = desk.add(5, 9, stop_ids=[8])
    for _ in range(2):
        desk.scheduler.schedule()
    finished = desk.scheduler.apply([(several, [8, 9])])
    lab.equal((several.tokens[5:], [r.id for r in finished]), ([8], [several.id]), "ids, and who finished, of results [8, 9]",
              "tokens behind a stop id are appended: it ends the answer, whatever came with it")  # fmt: skip


def knows_what_the_cache_has(lab: Lab) -> None:
    """The same two blocks three times: twice in one step, then once more from the cache."""
    desk = Desk(lab, publish=True)
    twins = [desk.add(8, 2, first=50) for _ in range(2)]
    desk.step()
    lab.equal(blocks(twins[1])[:2], blocks(twins[0])[:2], "full blocks of two with the same prompt, after one step of both",
              "publish answers the block that stands for the hash from now on, and the table keeps its own")  # fmt: skip
    desk.step()
    again = desk.add(8, 2, first=50)
    rows = [(start, n) for _, start, n in desk.scheduler.schedule().rows]
    lab.equal(rows, [(4, 4)], "row of a request with 8 tokens, both blocks of which are cached",
              "the lookup leaves no token to compute: ask for (known - 1) // block_size hashes at most")  # fmt: skip
    lab.equal((again.num_published, again.num_cached), (1, 4), "num_published and num_cached as it enters with one hit",
              "as a request enters, `num_published` is the number of hits, `num_cached` that of their tokens")  # fmt: skip


def believes_kept(lab: Lab) -> None:
    """Keys and values of 6, then of all 8 tokens are kept on the host."""
    for kept, row in ((6, (6, 2)), (8, (7, 1))):
        desk = Desk(lab)
        back = desk.request(8, 3)
        back.kept = kept
        desk.scheduler.add(back)
        rows = [(start, n) for _, start, n in desk.scheduler.schedule().rows]
        probably = "`kept` counts for at most known - 1 tokens: without one to compute there are no logits" if kept == 8 else ""
        lab.equal(rows, [row], f"row of a request of 8 tokens with {kept} kept", probably)
