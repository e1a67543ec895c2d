"""Stage 01: greedy decode, no cache. What is wrong here is wrong in every later stage, so ids are compared exactly, in fp32."""

from __future__ import annotations

from course.given.oracle import answer_of, differing, engine_answer, first_difference, prompt_of
from course.given.torch_model import load
from course.runner.checking import Lab, check

PROMPT, TOKENS = 8, 32


@check(
    gate="= 0",
    unit="ids",
    probably="the next token is not read from the last row of the logits, or not from a pass over the whole prefix",
)
def ids_equal_the_engine(lab: Lab) -> None:
    """ids that differ from the engine's"""
    model, wrong, told = load(), 0, ""
    for length in (1, 9, 40):
        prompt = prompt_of(length)
        want = engine_answer(prompt, 24)
        got = answer_of(lab, lab.app.naive_generate, model, list(prompt), 24)
        wrong += differing(got, want)
        told = told or (f"prompt of {length}, {first_difference(got, want)}" if got != want else "")
    lab.measure(wrong, detail=told)


@check(
    gate="= 752", unit="positions", probably="a pass is not over the whole prefix, or there is a pass whose token nobody gets"
)
def positions_grow_with_the_prefix(lab: Lab) -> None:
    """positions computed, 8 ids and 32 more"""
    model = load()
    got = answer_of(lab, lab.app.naive_generate, model, prompt_of(PROMPT), TOKENS)
    positions = [tokens for _, tokens in model.counts.shapes]
    detail = f"{model.counts.passes} passes for {len(got)} ids, over {positions[:3]} to {positions[-2:]}"
    lab.measure(
        model.counts.positions,
        baseline=PROMPT + TOKENS - 1,
        against="a loop that remembers",
        detail=f"8 + 9 + … + 39 = 752 was expected; {detail}",
    )
    lab.measure(positions[-1] / positions[0], name="last token against the first", unit="x", gate="= 4.875", detail=detail)


@check(gate="= 0", unit="ids", probably="only one of the eos ids ends the answer, or the id that ended it is left out")
def eos_ends_the_answer(lab: Lab) -> None:
    """ids too many or too few at an eos"""
    prompt, wrong, told = prompt_of(PROMPT, seed=3), 0, ""
    free = engine_answer(prompt, 24)
    unused = next(i for i in range(1024) if i not in free and i not in prompt)
    cases = [({free[0]}, "the first id is an eos"), ({free[9], free[5], unused}, "several ids are eos")]
    cases.append(({prompt[2], unused}, "the prompt holds an eos, which ends nothing"))
    for eos, what in cases:
        model, want = load(eos_ids=eos), engine_answer(prompt, 24, eos)
        got = answer_of(lab, lab.app.naive_generate, model, list(prompt), 24)
        wrong += differing(got, want) + abs(model.counts.passes - len(want))
        if got != want or model.counts.passes != len(want):
            told = told or f"{what}: yours {len(got)} ids in {model.counts.passes} passes, expected {len(want)} in as many"
    lab.measure(wrong, detail=told)


@check(gate="= 0", unit="ids", probably="the loop runs once too often, or the answer begins with the prompt")
def max_tokens_holds(lab: Lab) -> None:
    """ids past max_tokens, the prompt is kept"""
    model, prompt, over = load(), prompt_of(PROMPT, seed=1), []
    for most in (0, 1, 2, 17):
        given = list(prompt)
        over.append(len(answer_of(lab, lab.app.naive_generate, model, given, most)) - most)
        lab.equal(
            given, prompt, "the prompt after the call", "the new ids are appended to the caller's own list: take a copy first"
        )
    worst = max(over, key=abs)
    lab.measure(worst, detail=f"for max_tokens 0, 1, 2 and 17 the answer is longer by {over}")
