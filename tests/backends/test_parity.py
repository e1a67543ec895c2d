"""The torch backend against Hugging Face transformers: logits and greedy ids of the golden files, through the engine.

Logits are seen by observing the sampler part, so nothing of the engine is bypassed: all prompts of a model run as one ragged
batch, and every row of logits that a token was sampled from is compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny
from cutaway.checkpoints import open_checkpoint, resolve
from cutaway.core.plan import Limits, StepPlan, Ticket
from cutaway.core.request import Request, SamplingParams
from cutaway.engine.config import EngineConfig
from cutaway.engine.engine import Engine
from cutaway.engine.parts import Parts, load_module
from cutaway.text.chat import ChatTemplate
from cutaway.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
MODEL = "smollm2-135m-instruct"
TOLERANCE = 1e-3  # of logits, and of a margin that excuses another id

SMOLLM2 = json.loads((GOLDEN / "smollm2.json").read_text())
CASES: list[dict[str, Any]] = SMOLLM2["cases"]
TINY: list[dict[str, Any]] = json.loads((GOLDEN / "tiny.json").read_text())["cases"]


@dataclass
class Recorder:
    """A backend in front of the torch backend that remembers which request each sampled row of logits belongs to."""

    config: EngineConfig
    requests: list[Request] = field(default_factory=list)
    logits: dict[int, list[NDArray[np.float32]]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = Parts(observe={"sampler": self.observe})
        self.backend = load_module("cutaway.backends.torch.runner").create(self.config, self.parts)

    def observe(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if call == "sample":
            for id, row in zip(self.rows, args[0].float().numpy(), strict=True):
                self.logits[id].append(row.copy())

    def submit(self, plan: StepPlan) -> Ticket:
        owner = {request.slot: request.id for request in self.requests if request.slot >= 0}
        self.rows = [owner[slot] for slot in plan.slot[plan.samples].tolist()]
        return self.backend.submit(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def run(self, prompts: Sequence[Sequence[int]], tokens: int, *, prefix_cache: bool = False) -> list[list[int]]:
        """Greedy ids of each prompt; `logits[i]` holds the rows that prompt i's came from."""
        spec = self.backend.kv()
        window = (spec.num_blocks - 1) * spec.block_size
        engine = Engine(self, self.parts, Limits(window=window, block_size=spec.block_size), prefix_cache=prefix_cache)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.requests = [Request(i, list(prompt), params) for i, prompt in enumerate(prompts)]
        self.logits = {i: [] for i in range(len(prompts))}
        for request in self.requests:
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
        return [request.tokens[request.num_prompt :] for request in self.requests]


def check(cases: Sequence[dict[str, Any]], golden: Any, recorder: Recorder, answers: list[list[int]]) -> None:
    """Every row up to a case's first other id. That one must be a near-tie: what follows it is another text."""
    largest, compared, ties = 0.0, 0, 0
    for i, case in enumerate(cases):
        name, rows = case["name"], recorder.logits[i]
        if f"{name}.first" in golden:
            largest = max(largest, float(np.abs(rows[0] - golden[f"{name}.first"]).max()))
        for at, (id, expected, margin) in enumerate(zip(answers[i], case["greedy"], case["margins"], strict=True)):
            top = golden[f"{name}.top_ids"][at].astype(np.int64)
            difference = float(np.abs(rows[at][top] - golden[f"{name}.top"][at]).max())
            assert difference <= TOLERANCE, f"{name}, token {at}: logits differ by {difference:.2e}"
            largest, compared = max(largest, difference), compared + 1
            if id != expected:
                assert margin < TOLERANCE, f"{name}, token {at}: {id}, not {expected}, and no near-tie (margin {margin:.4f})"
                ties += 1
                break
    print(f"{compared} positions, largest difference of a logit {largest:.2e}, {ties} near-ties")
    assert largest <= TOLERANCE
    assert compared >= 0.9 * sum(len(case["greedy"]) for case in cases)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_tiny_models_equal_transformers(name: str, tmp_path: Path) -> None:
    """Every kind of architecture: seeded random weights, built by both sides from the same folder."""
    cases = [case for case in TINY if case["model"] == name]
    path = tiny.write_folder(tmp_path, name)
    recorder = Recorder(EngineConfig(model=str(path), dtype="fp32", kv_blocks=64, threads=1))
    answers = recorder.run([case["ids"] for case in cases], len(cases[0]["greedy"]))
    assert len(cases) == 3
    check(cases, np.load(GOLDEN / "tiny.npz"), recorder, answers)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_logits_and_greedy_ids_equal_transformers() -> None:
    recorder = Recorder(EngineConfig(model=str(resolve(MODEL)), dtype="fp32", max_model_len=512, kv_blocks=128, threads=1))
    answers = recorder.run([case["ids"] for case in CASES], len(CASES[0]["greedy"]))
    check(CASES, np.load(GOLDEN / "smollm2.npz"), recorder, answers)


@pytest.mark.model
@pytest.mark.slow
def test_bf16_chooses_the_same_token_nearly_always() -> None:
    """At every third position of the golden answers, given all tokens before it."""
    recorder = Recorder(EngineConfig(model=str(resolve(MODEL)), dtype="bf16", max_model_len=512, kv_blocks=256, threads=1))
    at = [(case, k) for case in CASES for k in range(0, len(case["greedy"]), 3)]
    answers = recorder.run([case["ids"] + case["greedy"][:k] for case, k in at], 1, prefix_cache=True)
    agree = [answer == [case["greedy"][k]] for answer, (case, k) in zip(answers, at, strict=True)]
    clear = [ok for ok, (case, k) in zip(agree, at, strict=True) if case["margins"][k] > 1]
    print(f"bf16 agrees with float32 at {sum(agree)} of {len(agree)} positions, at {sum(clear)} of {len(clear)} clear ones")
    assert sum(agree) >= 0.95 * len(agree)
    assert all(clear)


@pytest.mark.model
@pytest.mark.parametrize("name", SMOLLM2["weights"])
def test_dequantized_weights_are_bit_equal(name: str) -> None:
    array = open_checkpoint(resolve(MODEL)).load(name)
    assert array.dtype == "f32"
    assert hashlib.sha256(np.ascontiguousarray(array.data).tobytes()).hexdigest() == SMOLLM2["weights"][name]


@pytest.mark.model
def test_tokenizer_and_chat_template_give_the_golden_ids() -> None:
    assets = open_checkpoint(resolve(MODEL)).text()
    tokenizer, template = Tokenizer.open(assets), ChatTemplate.open(assets)
    for case in CASES:
        if "text" in case:
            assert tokenizer.encode(case["text"]) == case["ids"], case["name"]
        elif "messages" in case:
            rendered = template.render(case["messages"], add_generation_prompt=True)
            assert rendered == case["rendered"]
            assert tokenizer.encode(rendered, special=False) == case["ids"]
        if "answer" in case:
            assert tokenizer.decode(case["greedy"], skip_special=False) == case["answer"], case["name"]


@pytest.mark.model
@pytest.mark.parametrize("entry", SMOLLM2["texts"], ids=lambda entry: repr(entry["text"]))
def test_tokenizer_edges(entry: dict[str, Any]) -> None:
    tokenizer = Tokenizer.open(open_checkpoint(resolve(MODEL)).text())
    assert tokenizer.encode(entry["text"]) == entry["ids"]
    assert tokenizer.decode(entry["ids"], skip_special=False) == entry["text"]
