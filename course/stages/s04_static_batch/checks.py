"""Stage 04: static batching. Each row is held against the engine's answer to that prompt alone; what the batch wastes is
counted by the model, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence

from course.given.oracle import differing, engine_answer, first_difference, prompt_of
from course.given.torch_model import Model, load
from course.runner.checking import Lab, check, cut


def answers_of(lab: Lab, model: Model, prompts: list[list[int]], max_tokens: list[int] | int) -> list[list[int]]:
    """What the learner's file answers, for sure a list of ints a prompt; `model.counts` begin at none."""
    model.counts.reset()
    got = lab.app.static_batch_generate(model, [list(prompt) for prompt in prompts], max_tokens)
    rows = isinstance(got, list) and len(got) == len(prompts)
    lab.expect(
        rows and all(isinstance(row, list) and all(type(each) is int for each in row) for row in got),
        "the answer is a list of Python ints for each prompt, in the order of the prompts",
        f"for {len(prompts)} prompts yours is {type(got).__name__} {cut(got)}",
    )
    return got


def wrong_ids(got: Sequence[list[int]], want: Sequence[list[int]], prompts: Sequence[list[int]]) -> tuple[int, str]:
    """How many ids differ, and where the first row that does parts from what it should be."""
    told = ""
    for prompt, yours, right in zip(prompts, got, want, strict=True):
        if yours != right and not told:
            told = f"the row with a prompt of {len(prompt)}, {first_difference(yours, right)}"
    return sum(differing(a, b) for a, b in zip(got, want, strict=True)), told


@check(gate="= 0", unit="ids", probably="padding is seen: it needs no place in the mask, and no position of its own")
def rows_equal_the_row_alone(lab: Lab) -> None:
    """ids that differ from the row alone"""
    prompts = [prompt_of(length, seed=4) for length in (5, 9, 3, 12)]
    want = [engine_answer(prompt, 20) for prompt in prompts]
    wrong, told = wrong_ids(answers_of(lab, load(), prompts, 20), want, prompts)
    lab.measure(wrong, detail=told)


@check(
    gate="= 0",
    unit="ids",
    probably="the next token of a short row is read, or continued, behind its padding: fluent, and about nothing",
)
def very_ragged_prompts(lab: Lab) -> None:
    """ids that differ, prompts of 1 to 150"""
    prompts = [prompt_of(length, seed=5) for length in (150, 1, 40, 2)]
    want = [engine_answer(prompt, 12) for prompt in prompts]
    wrong, told = wrong_ids(answers_of(lab, load(), prompts, 12), want, prompts)
    lab.measure(wrong, detail=told)


@check(gate="= 0", unit="ids", probably="a row's answer goes on after its own budget or eos, because the batch does")
def every_row_ends_by_itself(lab: Lab) -> None:
    """ids past a row's own end"""
    prompts, budgets = [prompt_of(length, seed=6) for length in (7, 4, 11, 6)], [3, 0, 17, 1]
    long = engine_answer(prompts[2], budgets[2])
    eos = {long[5], long[9]}
    wrong, told = 0, ""
    for model, what in ((load(), "no eos"), (load(eos_ids=eos), "two eos ids")):
        ends = model.eos_ids
        want = [engine_answer(prompt, budget, ends) if budget else [] for prompt, budget in zip(prompts, budgets, strict=True)]
        got = answers_of(lab, model, prompts, budgets)
        late = model.counts.passes - max(map(len, want))
        ids, where = wrong_ids(got, want, prompts)
        wrong += ids + abs(late)
        if ids or late:
            seen = (
                f"lengths {[len(row) for row in got]}, expected {[len(row) for row in want]}; passes after the last end: {late}"
            )
            told = told or f"{what}: {where or seen}"
    lab.measure(wrong, detail=told)
    lab.equal(answers_of(lab, load(), [], 5), [], "the answers to no prompts")


@check(gate="> 2.00", unit="x", probably="the rows go through the model one after the other, or K and V are computed again")
def eight_rows_against_eight_runs(lab: Lab) -> None:
    """time of eight runs, against eight rows"""
    model = load()
    prompts = [prompt_of(12, seed=seed) for seed in range(8)]
    generate = lab.app.static_batch_generate
    alone = [answers_of(lab, model, [prompt], 8)[0] for prompt in prompts]
    lab.equal(answers_of(lab, model, prompts, 8), alone, "eight rows together")
    lab.ratio(lambda: [generate(model, [prompt], 8) for prompt in prompts], lambda: generate(model, prompts, 8))


@check(
    gate="= 196",
    unit="slots",
    probably="a batch that is static computes every row until the last one ends: rows x longest slots, less the ids",
)
def wasted_slots_counted(lab: Lab) -> None:
    """slots whose id nobody wanted, of 256"""
    waste = lab.app.padding_waste
    for lengths, share in (([], 0.0), ([0, 0], 0.0), ([5, 5, 5], 0.0), ([1, 3], 1 / 3), ([10, 0], 0.5)):
        found = waste(lengths)
        detail = f"padding_waste({lengths}) is {found}, expected {share:.4f}"
        lab.expect(isinstance(found, int | float) and abs(found - share) < 1e-9, "the share of rows x longest", detail)
    model = load()
    prompts, budgets = [prompt_of(5 + row, seed=7) for row in range(8)], [4] * 7 + [32]
    lengths = [len(row) for row in answers_of(lab, model, prompts, budgets)]
    slots = sum(rows for rows, _ in model.counts.shapes)  # a pass has one slot for a new id in each of its rows
    counted = slots - sum(lengths)
    detail = f"{model.counts.passes} passes with {slots} slots, {sum(lengths)} ids; expected 32 passes of 8 rows and 60 ids"
    lab.measure(counted, baseline=0, detail=detail)
    lab.measure(
        100 * waste(lengths), name="the same from padding_waste", gate="= 76.5625", unit="%", detail=f"lengths {lengths}"
    )
