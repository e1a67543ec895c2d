"""`LLM`, and that it gives the ids that a server gives. On the fake backend with a tiny model's tokenizer, and on torch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from rigs import run, running

import tiny
from cutaway import LLM, SamplingParams
from cutaway.core.errors import BadRequest, CutawayError
from cutaway.core.request import FinishReason, Output, Request
from cutaway.engine.channel import ProcessChannel
from cutaway.engine.config import EngineConfig
from cutaway.engine.front import Front
from cutaway.engine.llm import Completion
from cutaway.engine.parts import Parts

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama")


def settings(model: Path, backend: str = "fake:create", **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "backend": f"cutaway.backends.{backend}",
        "dtype": "fp32",
        "threads": 1,
        "kv_blocks": 129,
    } | more


@pytest.fixture
def llm(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setenv("CUTAWAY_FAKE_VOCABULARY", str(tiny.VOCABULARY))
    monkeypatch.setenv("CUTAWAY_DEBUG", "1")
    with LLM(**settings(model)) as llm:
        yield llm


def used(llm: LLM) -> tuple[int, int, int]:
    """Blocks in use beside the dummy, requests running, requests waiting."""
    while llm.engine.has_work:
        llm.engine.step()
    stats = llm.engine.stats()
    return stats.used - 1, stats.running, stats.waiting


def test_answers_keep_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i}" * (20 - i) for i in range(20)]
    lengths = [SamplingParams(temperature=0, max_tokens=i + 1, ignore_eos=True) for i in range(20)]
    together = llm.generate(prompts, lengths)
    assert [len(c.token_ids) for c in together] == [i + 1 for i in range(20)]
    assert [c.prompt_token_ids for c in together] == [llm.front.tokenizer.encode(p) for p in prompts]
    for prompt, params, answer in zip(prompts, lengths, together, strict=True):
        [alone] = llm.generate(prompt, params)
        assert (alone.token_ids, alone.text) == (answer.token_ids, answer.text)
        assert alone.text == llm.front.tokenizer.decode(alone.token_ids)
        assert alone.finish_reason is FinishReason.LENGTH
        assert alone.num_cached == (len(alone.prompt_token_ids) - 1) // 16 * 16
    assert used(llm) == (0, 0, 0)


def test_prompts_as_text_or_ids_one_or_many(llm: LLM) -> None:
    ids = llm.front.tokenizer.encode("the quick brown fox")
    answers = [
        llm.generate("the quick brown fox", GREEDY),
        llm.generate(["the quick brown fox"], [GREEDY]),
        llm.generate(ids, GREEDY),
        llm.generate([ids], GREEDY),
    ]
    assert len({tuple(a[0].token_ids) for a in answers}) == 1
    assert llm.generate([]) == []
    with pytest.raises(CutawayError, match="2 prompts need one SamplingParams or 2 of them, got 1"):
        llm.generate(["a", "b"], [GREEDY])


def test_chat(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    [one] = llm.chat(hello, GREEDY)
    two = llm.chat([hello, [{"role": "user", "content": "the way"}]], GREEDY)
    assert one.token_ids == two[0].token_ids != two[1].token_ids
    assert llm.front.tokenizer.decode(one.prompt_token_ids, skip_special=False) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.engine.stats()
    with pytest.raises(BadRequest, match=r"prompt\[0\]"):
        llm.generate([[1, 2], [tiny.VOCABULARY]], GREEDY)
    with pytest.raises(BadRequest, match="window is 512"):
        llm.generate(["fine", "x" * 300], SamplingParams(max_tokens=500))
    assert llm.engine.stats() == before
    assert used(llm) == (0, 0, 0)


def test_what_the_pool_cannot_hold_is_outside_the_window(model: Path) -> None:
    with LLM(**settings(model, kv_blocks=5)) as llm:
        assert llm.front.window == 64
        assert len(llm.generate([1] * 10, SamplingParams(ignore_eos=True))[0].token_ids) == 54
        with pytest.raises(BadRequest, match="window is 64"):
            llm.generate([1] * 10, SamplingParams(max_tokens=55))


def test_a_stop_string_ends_one_answer_and_not_the_others(llm: LLM) -> None:
    [free] = llm.generate("of the", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2))
    pieces = [llm.front.tokenizer.decode([id]) for id in free.token_ids]
    at = next(i for i in range(5, 30) if len(pieces[i]) > 1 and "\ufffd" not in pieces[i])
    stop = pieces[at][-2:]
    first = min(i for i in range(40) if stop in llm.front.tokenizer.decode(free.token_ids[: i + 1]))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop], logprobs=2)
    stopped, other = llm.generate(["of the", "of the"], [params, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, stop)
    assert stopped.logprobs is not None
    assert stopped.logprobs == (free.logprobs or [])[: first + 1]
    assert (other.token_ids, other.finish_reason) == (free.token_ids, FinishReason.LENGTH)
    assert used(llm) == (0, 0, 0)


def test_a_stop_id_is_counted_and_named(llm: LLM) -> None:
    [free] = llm.generate("of the", GREEDY)
    stop = free.token_ids[6]
    cut = free.token_ids.index(stop) + 1
    [stopped] = llm.generate("of the", SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[stop]))
    assert stopped.token_ids == free.token_ids[:cut]
    assert stopped.text == llm.front.tokenizer.decode(free.token_ids[: cut - 1])
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, stop)


def test_streams_run_side_by_side_and_end_when_closed(llm: LLM) -> None:
    [expected] = llm.generate("of the", GREEDY)
    first, second = llm.stream("of the", GREEDY), llm.stream([{"role": "user", "content": "Hi"}], SamplingParams(seed=3))
    answer = Completion([])
    for delta in first:
        answer.add(delta)
        next(second)
        assert llm.engine.stats().running >= 1
    assert (answer.token_ids, answer.text, answer.finish_reason) == (expected.token_ids, expected.text, FinishReason.LENGTH)
    second.close()  # type: ignore[attr-defined]
    assert used(llm) == (0, 0, 0)
    with pytest.raises(BadRequest):
        llm.stream([], GREEDY)


def test_ctrl_c_in_the_middle_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, left = llm.engine.step, [3]

    def interrupted() -> list[Output]:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], GREEDY)
    assert used(llm) == (0, 0, 0)
    assert len(llm.generate("a", GREEDY)[0].token_ids) == 12


def test_settings_that_do_not_exist(model: Path) -> None:
    with pytest.raises(CutawayError, match="temprature is not a setting of LLM; known: model, dtype"):
        LLM(str(model), temprature=1)
    with pytest.raises(CutawayError, match='backend must be "module:function"'):
        LLM(str(model), backend="nothing")
    with pytest.raises(CutawayError, match="max_model_len must be 2 to 512"):
        LLM(str(model), max_model_len=513)


@pytest.mark.parametrize("backend", ["fake:create", "torch.runner:create"])
def test_the_same_ids_as_through_the_engine_process(model: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_FAKE_VOCABULARY", str(tiny.VOCABULARY))
    asked = [
        ("the quick brown fox", GREEDY),
        ("of which there would be some", SamplingParams(seed=7, max_tokens=20, top_p=0.9)),
        ("of which there would be some", SamplingParams(seed=8, max_tokens=20, stop=["e"], logprobs=3)),
        ([3, 4, 5] * 20, SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[9])),
    ]
    with LLM(**settings(model, backend)) as llm:
        here = llm.generate([p for p, _ in asked], [s for _, s in asked])

    async def there() -> list[Completion]:
        config = EngineConfig(**settings(model, backend))
        front, channel = Front.open(config, Parts()), ProcessChannel(config)
        async with running(channel) as engine:
            front.adopt(channel.ready)

            async def answer(request: Request) -> Completion:
                whole, stream = Completion(list(request.tokens)), front.stream(request)
                async with aclosing(engine.generate(request)) as outputs:
                    async for output in outputs:
                        whole.add(stream.push(output))
                        if stream.finished:
                            break
                return whole

            answers = await asyncio.gather(*(answer(front.complete(p, s)) for p, s in asked))
            assert engine.num_active == 0
            return answers

    for a, b in zip(here, run(there()), strict=True):
        assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (b.token_ids, b.text, b.finish_reason, b.stop_reason)
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs is not None and b.logprobs is not None:
            assert [p.top_ids for p in a.logprobs] == [p.top_ids for p in b.logprobs]
            assert [p.chosen for p in a.logprobs] == pytest.approx([p.chosen for p in b.logprobs], abs=1e-4)


@pytest.mark.model
def test_the_built_in_model_answers() -> None:
    with LLM(max_model_len=256, kv_blocks=65) as llm:
        [answer] = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=30)
        )
        assert "Paris" in answer.text
