"""Continuous batching: who is in the batch is decided anew for every token."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from course.given.torch_model import Model, attend
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(eq=False)
class Request:
    id: int
    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    finished: bool = False
    keys: list[Tensor] = field(default_factory=list, repr=False)  # a layer: [tokens, kv_heads, dim]; the row's alone
    values: list[Tensor] = field(default_factory=list, repr=False)


class ContinuousEngine:
    def __init__(self, model: Model, max_batch_size: int = 8):
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._model = model
        self._most = max_batch_size

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add_request(self, id: int, prompt: list[int], max_tokens: int) -> None:
        self.waiting.append(Request(id, list(prompt), max_tokens))

    @torch.inference_mode()
    def step(self) -> list[Request]:
        old = list(self.running)
        while self.waiting and len(self.running) < self._most:
            new = self.waiting.popleft()
            self.running.append(new)
            self._run([new], [new.prompt])
        if old:
            self._run(old, [row.output[-1:] for row in old])
        finished = [row for row in self.running if row.finished]
        self.running = [row for row in self.running if not row.finished]
        for row in finished:  # whoever holds the request does not hold its memory
            row.keys, row.values = [], []
        return finished

    def _run(self, rows: list[Request], ids: list[list[int]]) -> None:
        """One forward pass over the ids of each row, as many for one row as for another; each gets the id that follows."""
        model = self._model
        empty = torch.empty(0, model.num_kv_heads, model.head_dim, dtype=model.dtype, device=model.device)
        for row in rows:
            if not row.keys:
                row.keys, row.values = [empty] * model.num_layers, [empty] * model.num_layers
        known = torch.tensor([[len(row.keys[0])] for row in rows], device=model.device)
        positions = known + torch.arange(len(ids[0]), device=model.device)
        columns = torch.arange(int(positions.max()) + 1, device=model.device)
        mask = columns <= positions[:, :, None]  # a shorter row ends in padding, which lies behind its own position
        x = model.embed(torch.tensor(ids, device=model.device))
        for index, layer in enumerate(model.layers):
            q, k, v = layer.qkv(x, positions)
            for row, new_keys, new_values in zip(rows, k, v, strict=True):
                row.keys[index] = torch.cat((row.keys[index], new_keys))
                row.values[index] = torch.cat((row.values[index], new_values))
            keys = pad_sequence([row.keys[index] for row in rows], batch_first=True)
            values = pad_sequence([row.values[index] for row in rows], batch_first=True)
            x = layer.finish(x, attend(q, keys, values, mask))
        for row, token in zip(rows, model.logits(x[:, -1:])[:, 0].argmax(-1).tolist(), strict=True):
            row.output.append(token)
            row.finished = len(row.output) == row.max_tokens or token in model.eos_ids


def run_all(model: Model, jobs: list[tuple[list[int], int]], max_batch_size: int = 8) -> list[list[int]]:
    engine = ContinuousEngine(model, max_batch_size)
    answers: list[list[int]] = [[] for _ in jobs]
    for number, (prompt, max_tokens) in enumerate(jobs):
        engine.add_request(number, prompt, max_tokens)
    while engine.has_work:
        for request in engine.step():
            answers[request.id] = request.output
    return answers
