"""What the machine itself can do, measured in the same run as the engine, and what that allows the engine at most.

A step of decode has to read every weight and every row's keys and values once; a prefill has to do two operations a weight
and token. Time at the measured rates is the floor; a figure's share of it says how much is left, on any machine.
"""

from __future__ import annotations

import importlib
import math
import time
from dataclasses import dataclass
from typing import Any

from cutaway.checkpoints import open_checkpoint, resolve

READ_BYTES = 512 << 20  # far over any cache of a laptop or a small server
MATMUL = 2048


def _best(function: Any, repeats: int = 3) -> float:
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def _torch() -> Any:
    # By name: the command line imports this package, and half of the house is held free of tensor libraries.
    return importlib.import_module("torch")


def dram_read(size: int = READ_BYTES) -> float:
    """Bytes a second of a sum over memory, by all threads of torch."""
    torch = _torch()
    data = torch.ones(size // 4, dtype=torch.float32)
    return size / _best(data.sum)


def matmul(dtype: str, size: int = MATMUL) -> float:
    """Operations a second (two a multiply-add) of a square matrix product."""
    torch = _torch()
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    a, b = (torch.ones(size, size, dtype=kind) for _ in range(2))
    return 2 * size**3 / _best(lambda: a @ b)


@dataclass(frozen=True, slots=True)
class Work:
    """What one model asks of a machine: weights read a step, of them those that every prompt token is multiplied with."""

    weights: int  # read by a step of decode: all but an embedding table that is not also the head
    per_token: int  # of the layers, without the head: a prefill needs that for its last token alone
    kv_per_token: int  # numbers of keys and values
    item: int  # bytes a number

    @classmethod
    def of(cls, model: str, dtype: str) -> Work:
        checkpoint = open_checkpoint(resolve(model))
        config = checkpoint.config
        sizes = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.names()}
        embedding = sizes["model.embed_tokens.weight"]
        layers = sum(sizes.values()) - embedding - sizes.get("lm_head.weight", 0)
        kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return cls(layers + embedding, layers, kv, 2 if dtype == "bf16" else 4)

    def decode_floor(self, rows: int, context: int, read_rate: float) -> float:
        """Seconds a step."""
        return self.item * (self.weights + rows * context * self.kv_per_token) / read_rate

    def prefill_floor(self, tokens: int, matmul_rate: float) -> float:
        return 2 * (tokens * self.per_token + self.weights - self.per_token) / matmul_rate
