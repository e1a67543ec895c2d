"""What the first stages' checks hold an answer against: the engine, which has no code in common with a learner's loop."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from course.given.rig import ladder_engine, request, run
from course.given.torch_model import LADDER, Model
from course.runner.checking import Lab, cut

Generate = Callable[[Model, list[int], int], list[int]]


def prompt_of(length: int, seed: int | tuple[int, ...] = 0) -> list[int]:
    """A seeded prompt for the ladder model."""
    numbers = seed if isinstance(seed, tuple) else (seed,)
    return np.random.default_rng((*numbers, length)).integers(0, LADDER.vocab_size, length).tolist()


def engine_answer(prompt: Sequence[int], max_tokens: int, eos_ids: Iterable[int] = ()) -> list[int]:
    """The engine's greedy answer of the ladder model in fp32: paged KV, one prefill, then a token a step."""
    asked = request(0, prompt, max_tokens=max_tokens, stop_ids=eos_ids)
    run(ladder_engine(num_blocks=2 + (len(prompt) + max_tokens) // 16), [asked])
    return asked.tokens[len(prompt) :]


def answer_of(lab: Lab, generate: Generate, model: Model, prompt: list[int], max_tokens: int) -> list[int]:
    """What `generate` answers, for sure a list of ints; `model.counts` begin at none."""
    model.counts.reset()
    got = generate(model, prompt, max_tokens)
    lab.expect(
        isinstance(got, list) and all(type(each) is int for each in got),
        "the answer is a list of Python ints: `int(tensor)` or `tensor.tolist()` makes them",
        f"yours: {type(got).__name__} {cut(got)}",
    )
    return got


def differing(got: Sequence[int], want: Sequence[int]) -> int:
    """Places in which two answers differ; each id too many or too few is one."""
    return sum(a != b for a, b in zip(got, want, strict=False)) + abs(len(got) - len(want))


def first_difference(got: Sequence[int], want: Sequence[int]) -> str:
    """For a person: where two answers part, or "" where they do not."""
    for at in range(max(len(got), len(want))):
        if list(got[at : at + 1]) != list(want[at : at + 1]):
            return f"from id {at} on: yours {cut(list(got[at : at + 4]))}, expected {cut(list(want[at : at + 4]))}"
    return ""


def tensor_bytes() -> int:
    """Bytes of all memory that some live tensor looks into."""
    gc.collect()
    held: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())
