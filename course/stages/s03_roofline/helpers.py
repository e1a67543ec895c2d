"""What stage 03's checks know without the learner: work that PyTorch counts, rates that this machine reaches now, verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from course.given.torch_model import Model, attend
from course.runner import timing
from course.runner.checking import Lab, NotMeasured, passes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

LEAST, MOST = 5, 11  # samples before a verdict, and before giving up on one


def _linear(x: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    return 2 * out_val.numel() * x.shape[-1]


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Of q k^T and of weights times v, for all query heads. PyTorch's own formula refuses grouped heads before 2.13."""
    return 2 * q.numel() * (k.shape[2] + v.shape[2])


class Flop(TorchDispatchMode):
    """FLOP of all that is computed within, by PyTorch's own formulas and those of two operations that only a CPU has."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.formulas: dict[Any, Any] = {
            **flop_registry,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        }
        if torch.backends.mkldnn.is_available():
            self.formulas[torch.ops.mkldnn._linear_pointwise] = _linear

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch asks; with True it imports its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, formula = kwargs or {}, self.formulas.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


@torch.inference_mode()
def counted(model: Model, tokens: int, context: int) -> tuple[int, int]:
    """FLOP and bytes of a pass that is really made: FLOP as the counter sees them, bytes as the tensors are."""
    zeros = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    positions = torch.arange(context, context + tokens, device=model.device)
    mask = positions[:, None] >= torch.arange(context + tokens, device=model.device)
    read = model.weight_bytes
    with Flop() as flop:
        x = model.embed(zeros)
        for layer in model.layers:
            q, k, v = layer.qkv(x, positions)
            k, v = (torch.cat((each.new_zeros(1, context, *each.shape[2:]), each), 1) for each in (k, v))
            read += k.nbytes + v.nbytes
            x = layer.finish(x, attend(q, k, v, mask))
        model.logits(x[:, -1:])
    return flop.total, read


@dataclass(frozen=True, slots=True)
class Rates:
    """bandwidth: bytes of weights a second at one row. flop_rate: FLOP a second at many rows."""

    bandwidth: float
    flop_rate: float


@torch.inference_mode()
def rates(model: Model, rows: int) -> Rates:
    """What this machine reaches now with the layers of this model, attention left out: a query goes on as its own answer."""

    def through(rows: int) -> float:
        ids = torch.zeros(1, rows, dtype=torch.int64, device=model.device)
        positions = torch.arange(rows, device=model.device)
        began = model.clock()
        x = model.embed(ids)
        for layer in model.layers:
            x = layer.finish(x, layer.qkv(x, positions)[0])
        model.logits(x[:, -1:])
        return model.clock() - began

    one = median(through(1) for _ in range(5))
    many = min(through(rows) for _ in range(2))
    head = model.vocabulary * model.hidden_size
    return Rates(model.weight_bytes / one, 2 * (rows * (model.weight_bytes // model.dtype.itemsize - head) + head) / many)


def seconds_of(lab: Lab, value: object, what: str) -> float:
    """`value`, for sure a time that can be."""
    fine = isinstance(value, float) and math.isfinite(value) and value > 0
    lab.expect(fine, f"{what} answers seconds, a float above 0", f"yours: {value!r}")
    assert isinstance(value, float)
    return value


def judged(sample: Callable[[], float], gates: Sequence[str]) -> float:
    """The median of as many samples as it takes until their interval is within all gates or beyond one; then `Lab.measure`
    says which. Raises NotMeasured (busy) where it stays on both sides."""
    found: list[float] = []
    while True:
        found.append(sample())
        low, high = timing.interval(found)
        straddled = [gate for gate in gates if passes(gate, low) != passes(gate, high)]
        if len(found) >= LEAST and not straddled:
            return median(found)
        if len(found) >= MOST:
            raise NotMeasured(f"machine busy: {low:.2f} to {high:.2f} straddles the gate {straddled[0]}", busy=True)


def work(lab: Lab, model: Model, call: Callable[[], object], tokens: int, context: int) -> float:
    """FLOP that the passes over `tokens` tokens inside `call` really did, over those that such passes do after `context`."""
    expected, _ = counted(model, tokens, context)
    others = counted(model, context, 0)[0] if context else 0  # of passes that fill the context, if somebody does it that way
    model.counts.reset()
    with Flop() as flop:
        call()
    shapes = [tuple(shape) for shape in model.counts.shapes]
    mine = shapes.count((1, tokens))
    lab.expect(
        mine > 1, "no pass is timed, or the first one is: a first call pays for more than its work", f"passes over {shapes[:8]}"
    )
    filling = others * shapes.count((1, context)) if context != tokens else 0
    return (flop.total - filling) / (mine * expected)
