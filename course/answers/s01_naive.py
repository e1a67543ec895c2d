"""Greedy decode without a cache: every token is a pass over everything before it."""

from __future__ import annotations

import torch
from course.given.torch_model import Model


@torch.inference_mode()
def naive_generate(model: Model, prompt: list[int], max_tokens: int) -> list[int]:
    ids = list(prompt)  # a copy: the prompt is the caller's
    for _ in range(max_tokens):
        logits = model(torch.tensor([ids], device=model.device), last=True)
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in model.eos_ids:
            break
    return ids[len(prompt) :]
