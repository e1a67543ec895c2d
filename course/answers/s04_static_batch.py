"""Static batching: several prompts as the rows of one batch, padded on the left, until the slowest row has ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from course.given.torch_model import Model, attend


@torch.inference_mode()
def static_batch_generate(model: Model, prompts: list[list[int]], max_tokens: list[int] | int) -> list[list[int]]:
    budgets = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    going = [budget > 0 for budget in budgets]
    if not any(going):
        return answers
    device, width = model.device, max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    pads = torch.tensor([[width - len(prompt)] for prompt in prompts], device=device)
    columns = torch.arange(width, device=device)
    real = columns >= pads  # [rows, columns]: a token of the row, no padding
    positions = (columns - pads).clamp(min=0)  # of each row from its own first token
    causal = columns <= columns[:, None]
    itself = torch.eye(width, dtype=torch.bool, device=device)  # a query on padding has to see something, if only itself
    mask = causal & real[:, None] | itself
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    while any(going):
        x = model.embed(ids)
        for index, layer in enumerate(model.layers):
            q, k, v = layer.qkv(x, positions)
            if len(keys) == index:
                keys.append(k)
                values.append(v)
            else:
                keys[index] = torch.cat((keys[index], k), 1)
                values[index] = torch.cat((values[index], v), 1)
            x = layer.finish(x, attend(q, keys[index], values[index], mask))
        newest = model.logits(x[:, -1:])[:, 0].argmax(-1)
        for row, token in enumerate(newest.tolist()):
            if going[row]:
                answers[row].append(token)
                going[row] = len(answers[row]) < budgets[row] and token not in model.eos_ids
        ids = newest[:, None]  # rows that have ended go on, for nobody: that is what makes the batch static
        positions = positions[:, -1:] + 1
        real = torch.cat((real, real.new_ones(len(prompts), 1)), 1)
        mask = real[:, None]
    return answers


def padding_waste(lengths: Sequence[int]) -> float:
    slots = len(lengths) * max(lengths, default=0)
    return 1 - sum(lengths) / slots if slots else 0.0
