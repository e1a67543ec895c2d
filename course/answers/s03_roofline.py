"""What a pass costs: counted, predicted, measured."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from course.given.torch_model import Model, attend
from torch import Tensor


def weights(model: Model) -> tuple[int, int]:
    """Numbers in the matrices of all layers, and in the head."""
    q_and_o = 2 * model.num_heads * model.head_dim
    k_and_v = 2 * model.num_kv_heads * model.head_dim
    gate_up_down = 3 * model.intermediate_size
    return model.num_layers * model.hidden_size * (q_and_o + k_and_v + gate_up_down), model.vocabulary * model.hidden_size


def model_bytes(model: Model) -> int:
    return sum(weights(model)) * model.dtype.itemsize


def pass_bytes(model: Model, tokens: int, context: int = 0) -> int:
    kv_of_a_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize
    return model_bytes(model) + (context + tokens) * kv_of_a_token


def pass_flop(model: Model, tokens: int, context: int = 0) -> int:
    layers, head = weights(model)
    scores_and_sums = 2 * model.num_layers * model.num_heads * model.head_dim * (context + tokens)
    return 2 * (tokens * (layers + scores_and_sums) + head)


def intensity(model: Model, tokens: int, context: int = 0) -> float:
    return pass_flop(model, tokens, context) / pass_bytes(model, tokens, context)


def predicted_seconds(model: Model, tokens: int, context: int, bandwidth: float, flop_rate: float) -> float:
    return max(pass_bytes(model, tokens, context) / bandwidth, pass_flop(model, tokens, context) / flop_rate)


def achieved_bandwidth(num_bytes: float, seconds: float) -> float:
    return num_bytes / seconds


def prefill_seconds(model: Model, num_tokens: int) -> float:
    return timed(model, one_pass(model, num_tokens, 0), repeats=3)


def decode_seconds(model: Model, context: int) -> float:
    return timed(model, one_pass(model, 1, context), repeats=7)


def one_pass(model: Model, tokens: int, context: int) -> Callable[[], Tensor]:
    """A pass over `tokens` after `context` kept positions. What these hold makes no difference to the time."""
    stop = context + tokens
    shape = (1, stop, model.num_kv_heads, model.head_dim)
    kept = [[torch.ones(shape, dtype=model.dtype, device=model.device) for _ in "kv"] for _ in model.layers]
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    positions = torch.arange(context, stop, device=model.device)
    mask = positions[:, None] >= torch.arange(stop, device=model.device)

    @torch.inference_mode()
    def run() -> Tensor:
        x = model.embed(ids)
        for layer, (k_kept, v_kept) in zip(model.layers, kept, strict=True):
            q, k_kept[:, context:], v_kept[:, context:] = layer.qkv(x, positions)
            x = layer.finish(x, attend(q, k_kept, v_kept, mask))
        return model.logits(x[:, -1:])

    return run


def timed(model: Model, run: Callable[[], Tensor], repeats: int) -> float:
    """Median seconds of a call, after one that pays what only a first call pays."""
    run()
    taken: list[float] = []
    for _ in range(repeats):
        began = model.clock()
        run()
        taken.append(model.clock() - began)
    return median(taken)
