"""What the ledger's rows are given: prompts that begin alike, answers of ragged lengths, one KV memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK = 16
LENGTHS = [24, 9, 30, 12, 56, 16, 8, 28, 14, 20, 10, 32, 11, 18, 25, 13]  # ragged, one of them long, as answers are
SYSTEM = """\
You are the assistant of a small museum of engines. Visitors stand in front of a machine and ask you what they see. Answer in
plain words, as you would to a curious friend: first what the part does, then why it is there, then what happens when it fails.
Give numbers where you know them and say so where you do not. Keep to the machine that the visitor asks about. If a question is
about something else, answer it in one sentence and come back to the engine. Never invent a date. Never use a word that a
twelve year old would have to look up without explaining it in the same sentence. If the visitor is wrong, say what is right and
do not say that they are wrong.
"""
QUESTIONS = [
    "What does the flywheel do?",
    "Why is the boiler riveted and not welded? My grandfather was a welder, and he said that a weld is the stronger.",
    "How hot is the steam when it reaches the cylinder?",
    "My daughter asks why the wheels of the locomotive are joined by rods. I told her that it is so that they turn together, "
    "but they stand on the same rail, so would they not turn together anyway?",
    "Who built this one?",
    "What is the small brass ball on top for? It spins faster when the engine does, and then the arms go up.",
    "Is that oil or water dripping from the pipe?",
    "There are two pistons of different size on this engine, and the same steam seems to go through both of them. Why would "
    "one use the steam twice, and why is the second piston so much larger than the first?",
    "How loud was it when it ran?",
    "If I closed this valve while the engine ran, what would happen first?",
    "Why does the diesel have no spark plugs?",
    "How many horses is this engine worth, and how did anybody ever measure such a thing?",
    "Can it run backwards?",
    "The sign says that the engine ran for forty years without a stop. Is that possible? What about the bearings?",
    "What is the oldest part here?",
    "Which of these engines would you take to a desert, where there is fuel but very little water, and why that one?",
]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that begin alike, and how long each answer is. window: tokens that a reserved row takes; memory: KV slots."""

    prompts: list[list[int]]
    answers: list[int]
    shared: int
    window: int
    memory: int
    budget: int  # tokens a step, where prompts go in whole
    slices: int  # and where they go in slices

    @property
    def rows(self) -> int:
        """Reserved rows that fit at once."""
        return max(1, self.memory // self.window)

    @property
    def told(self) -> str:
        own = [len(p) - self.shared for p in self.prompts]
        return (
            f"{len(self.prompts)} requests at once, {self.shared} tokens in common and {min(own)} to {max(own)} of their own, "
            f"answers of {min(self.answers)} to {max(self.answers)} tokens, {sum(self.answers)} in all; "
            f"KV memory of {self.memory:,} tokens, a window of {self.window}"
        )


def of_text() -> Workload:
    """Questions to the real model under one system message, by its own chat template: text, since on random ids a model is
    unsure of every next one, and near-ties are everywhere."""
    from course.given.torch_model import checkpoint
    from cutaway.text.chat import ChatTemplate
    from cutaway.text.tokenizer import Tokenizer

    assets = checkpoint("real").text()
    tokenizer, template = Tokenizer.open(assets), ChatTemplate.open(assets)
    prompts: list[list[int]] = []
    for question in QUESTIONS:
        said = [{"role": "system", "content": SYSTEM.replace("\n", " ").strip()}, {"role": "user", "content": question}]
        prompts.append(tokenizer.encode_rendered(template.render(said)))
    shared = next(n for n, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)
    return Workload(prompts, LENGTHS, shared, window=512, memory=1536, budget=512, slices=96)


def of_random_ids(vocabulary: int) -> Workload:
    """A small one of the same shape, for a model that knows no text."""
    draw = np.random.default_rng(7)
    shared, answers = 32, LENGTHS[4:12]
    system = draw.integers(0, vocabulary, shared).tolist()
    prompts = [system + draw.integers(0, vocabulary, n).tolist() for n in draw.integers(8, 17, len(answers)).tolist()]
    return Workload(prompts, answers, shared, window=256, memory=512, budget=128, slices=48)
