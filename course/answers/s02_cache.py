"""Greedy decode with a KV cache: every position is computed once."""

from __future__ import annotations

import torch
from course.given.torch_model import Model, attend


@torch.inference_mode()
def cached_generate(model: Model, prompt: list[int], max_tokens: int) -> list[int]:
    shape = (1, len(prompt) + max_tokens, model.num_kv_heads, model.head_dim)  # room for all of it, reserved at once
    keys = [torch.empty(shape, dtype=model.dtype, device=model.device) for _ in model.layers]
    values = [torch.empty_like(each) for each in keys]
    answer: list[int] = []
    new, start = prompt, 0  # the ids of the next pass, and the position of the first
    while len(answer) < max_tokens:
        stop = start + len(new)
        positions = torch.arange(start, stop, device=model.device)
        mask = positions[:, None] >= torch.arange(stop, device=model.device)  # a query looks at itself and what is before it
        x = model.embed(torch.tensor([new], device=model.device))
        for layer, k_kept, v_kept in zip(model.layers, keys, values, strict=True):
            q, k, v = layer.qkv(x, positions)
            k_kept[:, start:stop] = k
            v_kept[:, start:stop] = v
            x = layer.finish(x, attend(q, k_kept[:, :stop], v_kept[:, :stop], mask))
        answer.append(int(model.logits(x[:, -1:]).argmax()))
        if answer[-1] in model.eos_ids:
            break
        new, start = answer[-1:], stop
    return answer


def kv_bytes_per_token(model: Model) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize
