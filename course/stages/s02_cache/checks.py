"""Stage 02: the KV cache. Positions are counted inside the model, at the embedding and in every layer."""

from __future__ import annotations

import torch
from course.answers.s01_naive import naive_generate
from course.given.oracle import answer_of, differing, first_difference, prompt_of, tensor_bytes
from course.given.torch_model import Model, load, of_shape
from course.runner.checking import Lab, check

PROMPT, TOKENS = 100, 32


def positions_of(model: Model) -> int:
    """Positions that a call computed: in the embedding or, if those are more, in the layers."""
    return max(model.counts.positions, -(-model.counts.projected // model.num_layers))


@check(gate="= 0", unit="ids", probably="decoded tokens have wrong positions, or look at keys that are not theirs")
def ids_equal_stage_01(lab: Lab) -> None:
    """ids that differ from stage 01's"""
    model, wrong, told = load(), 0, ""
    for length in (1, 7, 64):
        prompt = prompt_of(length)
        want = naive_generate(model, prompt, 24)
        got = answer_of(lab, lab.app.cached_generate, model, list(prompt), 24)
        wrong += differing(got, want)
        told = told or (f"prompt of {length}, {first_difference(got, want)}" if got != want else "")
    lab.measure(wrong, detail=told)


@check(gate="= 0", unit="prompts", probably="the prompt's tokens see their own future: the first pass needs a causal mask")
def prompt_is_causal(lab: Lab) -> None:
    """prompts whose first new id is wrong"""
    model, wrong = load(), []
    for length in range(2, 80, 6):
        prompt = prompt_of(length, seed=2)
        got = answer_of(lab, lab.app.cached_generate, model, list(prompt), 1)
        if got != naive_generate(model, prompt, 1):
            wrong.append(length)
    lab.measure(len(wrong), detail=f"of 13 prompts, those of {wrong} ids")


@check(gate="= 131", unit="positions", probably="something that was computed is computed again: the prompt, or the last id")
def each_position_once(lab: Lab) -> None:
    """positions computed, 100 ids and 32 more"""
    model = load()
    naive_generate(model, prompt_of(PROMPT), TOKENS)
    before = model.counts.positions
    answer_of(lab, lab.app.cached_generate, model, prompt_of(PROMPT), TOKENS)
    shapes = [tokens for _, tokens in model.counts.shapes]
    lab.measure(
        model.counts.positions,
        baseline=before,
        against="stage 01",
        detail=f"100 + 32 - 1 were expected; passes were over {shapes[:4]} …",
    )
    lab.measure(
        model.counts.projected / model.num_layers,
        name="the same, in each layer",
        unit="positions",
        gate="= 131",
        probably="the layers run over positions whose keys and values are kept",
    )


@check(gate="= 32", unit="passes", probably="the prompt is fed id by id, or there is a pass whose token nobody gets")
def one_pass_a_token(lab: Lab) -> None:
    """forward passes for 32 ids"""
    model = load()
    answer = answer_of(lab, lab.app.cached_generate, model, prompt_of(PROMPT), TOKENS)
    lab.measure(model.counts.passes, detail=f"for {len(answer)} ids; passes over {[n for _, n in model.counts.shapes][:4]} …")
    stopped = load(eos_ids={answer[11], answer[5]})
    want = naive_generate(stopped, prompt_of(PROMPT), TOKENS)
    got = answer_of(lab, lab.app.cached_generate, stopped, prompt_of(PROMPT), TOKENS)
    lab.equal(got, want, "an answer that an eos ends", "the eos is left out, or decoding goes on past it")
    lab.measure(stopped.counts.passes - len(want), name="passes past the eos", unit="passes", gate="= 0")


@check(
    gate="= 4096",
    unit="bytes",
    probably="query heads are counted where only key heads are kept, or one of k and v, or one layer",
)
def bytes_per_token(lab: Lab) -> None:
    """bytes of a token's keys and values"""
    lab.measure(lab.app.kv_bytes_per_token(load()), detail="4 layers, 2 of k and v, 2 key heads of 64 in fp32")
    for name, model in (
        ("with a key head for each query head", of_shape(num_kv_heads=4)),
        ("with one key head, 2 layers, bf16", of_shape(torch.bfloat16, num_kv_heads=1, num_layers=2)),
        ("with heads of 32, hidden 256", of_shape(head_dim=32)),
    ):
        with torch.inference_mode():
            zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
            x = model.embed(zero)
            held = sum(each.nbytes for layer in model.layers for each in layer.qkv(x, zero[0])[1:])
        got = lab.app.kv_bytes_per_token(model)
        lab.measure(got - held, name=name, unit="bytes off", gate="= 0", detail=f"{name}: yours {got}, held {held}")


@check(gate="> 15.00", unit="x", probably="the prompt is computed more than once")
def gain_grows_with_the_prompt(lab: Lab) -> None:
    """fewer positions than 01, prompt of 256"""
    gains: dict[int, float] = {}
    model, app = load(), lab.app
    for length in (8, 256):
        naive_generate(model, prompt_of(length), 16)
        before = model.counts.positions
        answer_of(lab, app.cached_generate, model, prompt_of(length), 16)
        gains[length] = before / max(positions_of(model), 1)
    told = f"{gains[8]:.1f}x at a prompt of 8, {gains[256]:.1f}x at 256, for 16 ids each; 16x is the limit"
    lab.measure(gains[256], baseline=gains[8], detail=told)
    lab.measure(gains[256] / gains[8], name="the gain at 256, against 8", unit="x", gate="> 1.40", detail=told)
    for length in (8, 256):
        prompt = prompt_of(length)
        lab.ratio(
            lambda prompt=prompt: naive_generate(model, prompt, 16),
            lambda prompt=prompt: app.cached_generate(model, prompt, 16),
            name=f"faster, prompt {length}",
            gate="",
            rounds=2,
        )


@check(gate="= 0", unit="ids", probably="keys of the call before are still there: a default argument, or a cache in the module")
def calls_leave_nothing_behind(lab: Lab) -> None:
    """ids that a call before it changed"""
    model, wrong, told = load(), 0, ""
    first, second = prompt_of(20, seed=5), prompt_of(33, seed=6)
    wants = {id(each): naive_generate(model, each, 12) for each in (first, second)}
    before = tensor_bytes()
    for at, prompt in enumerate((first, second, first, first)):
        given = list(prompt)
        got = answer_of(lab, lab.app.cached_generate, model, given, 12)
        lab.equal(given, prompt, "the prompt after the call", "the new ids are appended to the caller's own list")
        wrong += differing(got, wants[id(prompt)])
        told = told or (f"call {at + 1}, {first_difference(got, wants[id(prompt)])}" if got != wants[id(prompt)] else "")
    lab.measure(wrong, detail=told)
    kept = tensor_bytes() - before
    reason = "something outside the call holds its keys and values: a module, a default argument, an attribute of the function"
    lab.measure(kept, name="bytes held after the calls", unit="bytes", gate="= 0", probably=reason)
