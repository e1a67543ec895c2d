"""Stage 05: continuous batching. Rows are held against the engine's answer to each prompt alone, passes against stage 04's
answer on the same requests; both are counted by the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course.answers.s04_static_batch import static_batch_generate
from course.given.oracle import differing, engine_answer, first_difference, prompt_of, tensor_bytes
from course.given.torch_model import Model, load
from course.runner.checking import Lab, check, cut

Job = tuple[list[int], int]


def jobs_of(lengths: Sequence[int], budgets: Sequence[int], seed: int) -> list[Job]:
    return [
        (prompt_of(length, seed=(seed, n)), budget) for n, (length, budget) in enumerate(zip(lengths, budgets, strict=True))
    ]


def expected(jobs: Sequence[Job], eos: Sequence[int] = ()) -> list[list[int]]:
    return [engine_answer(prompt, budget, eos) for prompt, budget in jobs]


def all_answers(lab: Lab, model: Model, jobs: list[Job], most: int) -> list[list[int]]:
    """What `run_all` answers, for sure a list of ints a job; `model.counts` begin at none."""
    model.counts.reset()
    got = lab.app.run_all(model, [(list(prompt), budget) for prompt, budget in jobs], most)
    rows = isinstance(got, list) and len(got) == len(jobs)
    lab.expect(
        rows and all(isinstance(row, list) and all(type(each) is int for each in row) for row in got),
        "run_all answers a list of Python ints for each job, in the order of the jobs",
        f"for {len(jobs)} jobs yours is {type(got).__name__} {cut(got)}",
    )
    return got


def engine_of(lab: Lab, model: Model, jobs: Sequence[Job], most: int) -> Any:
    model.counts.reset()
    engine = lab.app.ContinuousEngine(model, most)
    for number, (prompt, budget) in enumerate(jobs):
        engine.add_request(number, list(prompt), budget)
    return engine


def step(lab: Lab, engine: Any, steps: int) -> list[Any]:
    """One step, whose answer is for sure a list; `steps` were done, so that an engine that never ends is told."""
    lab.expect(steps < 500, "the engine has work for ever: a request that ends is not taken out, or none is admitted")
    done = engine.step()
    lab.expect(isinstance(done, list), "step answers the list of requests that it finished", f"yours: {cut(done)}")
    return done


def finish(lab: Lab, engine: Any) -> dict[int, list[int]]:
    """Steps until nothing is left; the answers by id."""
    answers: dict[int, list[int]] = {}
    steps = 0
    while engine.has_work:
        for request in step(lab, engine, steps):
            lab.expect(request.id not in answers, "a request is answered by step as finished more than once")
            answers[request.id] = list(request.output)
        steps += 1
    return answers


def wrong_ids(got: Sequence[list[int]], want: Sequence[list[int]]) -> tuple[int, str]:
    told = next(
        (f"request {n}, {first_difference(a, b)}" for n, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), ""
    )
    return sum(differing(a, b) for a, b in zip(got, want, strict=True)), told


@check(gate="= 0", unit="ids", probably="a row is given the position, or sees the padded keys, of a longer row beside it")
def rows_equal_the_row_alone(lab: Lab) -> None:
    """ids that differ, caps of 1, 2 and 4"""
    jobs = jobs_of((5, 60, 1, 17, 9, 33), (9, 12, 20, 5, 14, 8), 1)
    want, wrong, told = expected(jobs), 0, ""
    for most in (1, 2, 4):
        ids, where = wrong_ids(all_answers(lab, load(), jobs, most), want)
        wrong, told = wrong + ids, told or (f"at most {most} rows: {where}" if ids else "")
    lab.measure(wrong, detail=told)


@check(gate="= 0", unit="ids", probably="a row goes on after its own budget, or after an end-of-sequence id")
def budgets_are_the_rows_own(lab: Lab) -> None:
    """ids too many or too few, own budgets"""
    prompt, budgets = prompt_of(8, seed=2), (3, 7, 11, 1)
    free = engine_answer(prompt, 11)
    wrong, told = 0, ""
    for eos in ((), (free[4], free[8])):
        jobs = [(prompt, budget) for budget in budgets]
        got, want = all_answers(lab, load(eos_ids=eos), jobs, 4), expected(jobs, eos)
        wrong += wrong_ids(got, want)[0]
        if got != want:
            lengths = f"{[len(row) for row in got]} ids, expected {[len(row) for row in want]}"
            told = told or f"{'an eos ends' if eos else 'budgets alone end'} the rows: {lengths}; {wrong_ids(got, want)[1]}"
    lab.measure(wrong, detail=told)


@check(gate="= 0", unit="rows", probably="who has ended is only looked for at the next step, or leaves with the whole batch")
def finished_leave_in_the_same_step(lab: Lab) -> None:
    """rows still there after their last id"""
    jobs = jobs_of((6, 9, 4, 7), (3, 10, 2, 1), 3)
    model = load()
    before = tensor_bytes()
    engine, stayed, steps, told = engine_of(lab, model, jobs, 2), 0, 0, ""
    answered: list[object] = []  # held, as a server holds requests whose text it is still sending
    while engine.has_work:
        done = step(lab, engine, steps)
        answered += done
        steps += 1
        ended = [r for r in [*engine.running, *done] if len(r.output) >= jobs[r.id][1]]
        late = [r.id for r in ended if r in engine.running or r not in done or not r.finished]
        stayed += len(late)
        told = told or (f"after step {steps} request {late[0]} has all its ids, and is running or not answered" if late else "")
    lab.measure(stayed, detail=told)
    lab.measure(steps, name="steps for 16 ids in two places", gate="= 10", unit="steps", baseline=13,
                probably="a free place is left empty for a step or more: fill it at the start of the next one",
                detail="the long request takes 10 steps, the three short ones 6 beside it")  # fmt: skip
    lab.measure(max(0, tensor_bytes() - before), name="bytes of K and V that finished requests hold", gate="= 0", unit="bytes",
                probably="a finished request keeps its K and V for as long as somebody holds the request")  # fmt: skip


@check(gate="= 2", unit="rows", probably="the place of a row that ends in this step is given away before the row has left")
def never_above_the_cap(lab: Lab) -> None:
    """rows in the widest step, at most 2"""
    jobs = jobs_of((6, 9, 4, 7, 5), (4, 6, 3, 5, 4), 4)
    model, widest, steps, begun = load(), 0, 0, []
    engine = engine_of(lab, model, jobs, 2)
    while engine.has_work:
        done = step(lab, engine, steps)
        steps += 1
        served = [r.id for r in [*engine.running, *done] if r.output]
        begun += [id for id in sorted(served) if id not in begun]
        widest = max(widest, len(engine.running), len(served), *(rows for rows, _ in model.counts.shapes))
    short = engine_of(lab, load(), jobs_of((6, 4, 5), (1, 1, 1), 8), 1)
    while short.has_work:
        served = [*short.running, *step(lab, short, 0)]
        lab.expect(len(served) <= 1, "a place that becomes free in this step is filled in the next one, not in this one",
                   f"with one place and budgets of 1, {len(served)} requests got an id in one step")  # fmt: skip
    lab.equal(begun, [0, 1, 2, 3, 4], "requests by their first id", "waiting requests are not served in the order of arrival")
    lab.measure(widest, detail=f"over {steps} steps with 5 requests")


@check(
    gate="< 60.0", unit="%", probably="a free place waits for the whole batch to end, or rows go through the model one by one"
)
def passes_against_static(lab: Lab) -> None:
    """forward passes, of what static takes"""
    jobs = jobs_of([6] * 12, [48, 3, 4, 3] * 3, 5)
    fixed = load()
    for first in range(0, len(jobs), 4):
        batch = jobs[first : first + 4]
        static_batch_generate(fixed, [prompt for prompt, _ in batch], [budget for _, budget in batch])
    model = load()
    wrong, told = wrong_ids(all_answers(lab, model, jobs, 4), expected(jobs))
    lab.equal(
        wrong, 0, f"ids that differ ({told})", "few passes are worth something only if the ids are right: see the first check"
    )
    passes, least = model.counts.passes, max(48, -(-sum(budget for _, budget in jobs) // 4))
    detail = f"{passes} passes, static {fixed.counts.passes}; no packing of 174 ids into 4 rows takes fewer than {least}"
    lab.measure(passes, name="passes, at least the best packing", gate=f">= {least}", baseline=fixed.counts.passes,
                detail=detail, probably="more rows than the cap ran in a pass, or ids came from no pass at all")  # fmt: skip
    lab.measure(100 * passes / fixed.counts.passes, baseline=100, against="static batching", detail=detail)


@check(
    gate="= 1", unit="steps", probably="a request is admitted only when the batch is empty, so whoever comes late waits for it"
)
def late_arrival_joins_and_is_exact(lab: Lab) -> None:
    """steps until a late request has an id"""
    jobs = jobs_of((10, 4, 25), (20, 15, 8), 6)
    engine, late = engine_of(lab, load(), jobs[:2], 3), jobs[2]
    for n in range(5):
        step(lab, engine, n)
    engine.add_request(2, list(late[0]), late[1])
    waited, answers = 0, {}
    while engine.has_work and not any(r.id == 2 and r.output for r in engine.running) and 2 not in answers:
        answers |= {r.id: list(r.output) for r in step(lab, engine, waited)}
        waited += 1
    answers |= finish(lab, engine)
    wrong, told = wrong_ids([answers.get(n, []) for n in range(3)], expected(jobs))
    lab.measure(wrong, name="ids that differ, old rows and new", gate="= 0", unit="ids", detail=told,
                probably="a row that joins is given the keys or the position of those that were there")  # fmt: skip
    lab.measure(waited, baseline=15)


@check(gate="= 1", unit="x", probably="all K and V are computed again whenever somebody comes or goes")
def each_position_once(lab: Lab) -> None:
    """positions computed, against needed"""
    jobs = jobs_of([16] * 7, (12, 3, 5, 9, 2, 7, 4), 7)
    model = load()
    answers = all_answers(lab, model, jobs, 3)
    lab.equal([len(row) for row in answers], [budget for _, budget in jobs], "lengths of the answers")
    needed = sum(len(prompt) + budget - 1 for prompt, budget in jobs)
    positions = max(model.counts.positions, model.counts.projected / model.num_layers)  # what was embedded, and what went on
    detail = f"{positions:g} positions in {model.counts.passes} passes; each prompt, and each id but the last, is {needed}"
    lab.measure(positions / needed, detail=detail)
