"""Stage 03: prefill and decode, two machines. What can be counted is counted; three ratios of times are left, and each may
end without a verdict on a busy machine."""

from __future__ import annotations

import math
from functools import cache
from statistics import median

import torch
from course.given.torch_model import Model, load, of_shape
from course.runner.checking import Lab, check
from course.stages.s03_roofline.helpers import counted, judged, rates, seconds_of, work

BUSY = 240.0  # seconds that a check which times may take until it gives up on a verdict; on a quiet machine it is 4
PASSES = ((1, 0), (1, 300), (64, 0), (32, 100))  # (tokens, context)


@cache
def models() -> dict[str, Model]:
    return {
        "the ladder model": load(),
        "one in bf16 with tied ends": of_shape(torch.bfloat16, num_layers=2, tie_embeddings=True),
        "one with a single key head, heads of 32": of_shape(num_kv_heads=1, head_dim=32, intermediate_size=384),
    }


@check(
    gate="= 0",
    unit="bytes",
    probably="a matrix is missing or counted twice, or the keys and values that the pass reads are left out",
)
def bytes_of_a_pass(lab: Lab) -> None:
    """bytes that a pass reads, off"""
    off, told = 0, ""
    for name, model in models().items():
        got = lab.app.model_bytes(model)
        lab.equal(got, model.weight_bytes, f"model_bytes of {name}", "not every matrix is counted once, in its dtype")
        for tokens, context in PASSES:
            got, (_, want) = lab.app.pass_bytes(model, tokens, context), counted(model, tokens, context)
            off += abs(got - want)
            told = told or (f"{name}, {tokens} tokens after {context}: yours {got}, read {want}" if got != want else "")
    lab.measure(off, detail=told)


@check(
    gate="= 0", unit="FLOP", probably="a multiply-add counts two, the head works for one position, attention for every kept one"
)
def flop_of_a_pass(lab: Lab) -> None:
    """FLOP of a pass, off PyTorch's count"""
    off, told = 0, ""
    for name, model in models().items():
        for tokens, context in PASSES:
            got, (want, _) = lab.app.pass_flop(model, tokens, context), counted(model, tokens, context)
            off += abs(got - want)
            told = told or (f"{name}, {tokens} tokens after {context}: yours {got}, counted {want}" if got != want else "")
    lab.measure(off, detail=told)


@check(gate="> 100", unit="x", probably="intensity is FLOP over bytes of the same pass, its kept tokens included")
def intensity_of_both(lab: Lab) -> None:
    """FLOP a byte, prefill against decode"""
    real = load("real")
    for tokens, context in ((1, 256), (256, 0)):
        flop, read = counted(real, tokens, context)
        got = lab.app.intensity(real, tokens, context)
        lab.expect(
            math.isclose(got, flop / read, rel_tol=1e-6), detail=f"{tokens} after {context}: {got}, counted {flop / read}"
        )
    prefill, decode = lab.app.intensity(real, 2048), lab.app.intensity(real, 1, 2048)
    lab.measure(prefill / decode, detail=f"prefill {prefill:.1f}, decode {decode:.2f} FLOP a byte")
    lab.measure(prefill, name="prefill of 2,048", unit="FLOP/byte")
    lab.measure(decode, name="decode after 2,048", unit="FLOP/byte", gate="< 2.00")


def prediction(lab: Lab) -> None:
    """The slower of two times, exactly."""
    model = load()
    flop, read = counted(model, 64, 0)
    for bandwidth, rate, want in ((1e9, 1e15, read / 1e9), (1e15, 1e9, flop / 1e9)):
        got = lab.app.predicted_seconds(model, 64, 0, bandwidth, rate)
        told = f"at {bandwidth:g} bytes/s and {rate:g} FLOP/s: yours {got}, expected {want}"
        lab.expect(
            math.isclose(got, want, rel_tol=1e-6), "reading and arithmetic overlap: a pass takes the longer of the two", told
        )


@check(
    gate="< 2.00",
    unit="x",
    seconds=BUSY,
    probably="prefill_seconds is not the time of one whole pass, or decode_seconds not that of one token",
)
def prefill_per_token_against_decode(lab: Lab) -> None:
    """decode against prefill, off prediction"""
    prediction(lab)
    app, small = lab.app, load()
    share = work(lab, small, lambda: app.prefill_seconds(small, 96), 96, 0)
    reason = "prefill asks for the logits of every position, or for less than a pass"
    lab.measure(
        abs(share - 1), name="FLOP of a timed prefill, off", gate="< 0.02", probably=reason, detail=f"{share:.3f} x a pass"
    )
    real, tokens = load("real"), 256 if lab.device == "cpu" else 2048
    ratios: list[float] = []
    predictions: list[float] = []

    def sample() -> float:
        rate = rates(real, tokens)
        prefill = seconds_of(lab, app.prefill_seconds(real, tokens), "prefill_seconds") / tokens
        decode = seconds_of(lab, app.decode_seconds(real, tokens), "decode_seconds")
        ratios.append(decode / prefill)
        expected = [app.predicted_seconds(real, n, c, rate.bandwidth, rate.flop_rate) for n, c in ((1, tokens), (tokens, 0))]
        predictions.append(expected[0] / (expected[1] / tokens))
        return ratios[-1] / predictions[-1]

    if lab.device != "cpu":
        lab.measure(
            judged(lambda: (sample(), ratios[-1])[1], ["> 20.00"]), gate="> 20.00", detail="decode against prefill, a token"
        )
        return
    off = judged(sample, ("< 2.00", "> 0.50"))
    told = f"a token costs {median(ratios):.1f} x as much in decode as in prefill, {median(predictions):.1f} x was predicted"
    lab.measure(max(off, 1 / off), detail=told)
    lab.measure(median(ratios), name="decode against prefill, a token", unit="x", baseline=median(predictions))


@check(gate="< 1.50", unit="x", seconds=BUSY, probably="the time of filling the context is in the time of a token")
def decode_is_flat(lab: Lab) -> None:
    """decode after 1,024 kept, against 128"""
    app, small, real = lab.app, load(), load("real")
    share = work(lab, small, lambda: app.decode_seconds(small, 700), 1, 700)
    reason = "the timed passes do not look at all of the context"
    lab.measure(share, name="FLOP of a timed token, against a pass", unit="x", gate="> 0.98", probably=reason)

    def sample() -> float:
        short = seconds_of(lab, app.decode_seconds(real, 128), "decode_seconds")
        return seconds_of(lab, app.decode_seconds(real, 1024), "decode_seconds") / short

    baseline = app.pass_bytes(real, 1, 1024) / app.pass_bytes(real, 1, 128)
    lab.measure(judged(sample, ["< 1.50"]), baseline=baseline, detail=f"bytes grow to {baseline:.2f} x")


@check(
    gate="> 0.50",
    unit="x",
    seconds=BUSY,
    probably="bytes are divided by seconds, and decode_seconds is the time of a single token",
)
def decode_reads_at_the_machines_rate(lab: Lab) -> None:
    """bytes/s of decode, of the layers alone"""
    app, real = lab.app, load("real")
    got = app.achieved_bandwidth(14e9, 0.037)
    lab.expect(math.isclose(got, 14e9 / 0.037), detail=f"14 GB in 37 ms: yours {got}, expected {14e9 / 0.037:.4g} bytes/s")
    achieved: list[float] = []

    def sample() -> float:
        taken = seconds_of(lab, app.decode_seconds(real, 128), "decode_seconds")
        achieved.append(app.achieved_bandwidth(app.pass_bytes(real, 1, 128), taken))
        return achieved[-1] / rates(real, 1).bandwidth

    share = judged(sample, ("> 0.50", "< 1.40"))
    lab.measure(share)
    reason = "no memory is that fast: passes are still under way when the clock is read, or too many tokens are divided by"
    lab.measure(share, name="and not above it", unit="x", gate="< 1.40", probably=reason)
    lab.measure(median(achieved) / 1e9, name="decode reads", unit="GB/s")
