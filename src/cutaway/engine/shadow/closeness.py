"""Tensors beside tensors: how a shadow's attention is followed (stages 07 and 08), and when two results are close.

Nothing here imports torch, which this room does without: what is given brings its own methods.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from cutaway.engine.shadow.followers import Call, Differs, Follower, need_equal

EAGER = 64  # calls of an attention function that are all compared; later ones are a sample, so that serving stays fast
SAMPLE = 31  # one of so many: no number of layers, so that it wanders through them
TOLERANCE = {"torch.float32": 1e-4, "torch.float16": 1e-2, "torch.bfloat16": 5e-2}  # of a token's size


class AttentionFollower(Follower):
    """07, and whatever has its arguments: on a compact, contiguous copy of the blocks that the call names; in the engine's
    dtype, and in float32, where the tolerance is tighter. All of the first calls, then a sample."""

    seen = 0

    def prepare(self, call: Call) -> Callable[[], Any] | None:
        window = call.kwargs.get("window", 0)
        able = not window or "sliding_window" in getattr(self.module, "SUPPORTS", ())
        self.seen += 1
        if not able or (self.seen > EAGER and self.seen % SAMPLE):
            return None
        theirs = getattr(self.module, call.name)
        if call.name == "write_kv":
            k_cache, v_cache, k, v, slots = call.args
            self.blocks, place = slots.div(k_cache.shape[2], rounding_mode="floor").unique(return_inverse=True)
            caches = [cache.index_select(0, self.blocks) for cache in (k_cache, v_cache)]
            args = *caches, k.clone(), v.clone(), place * k_cache.shape[2] + slots % k_cache.shape[2]
            return lambda: [quietly(theirs, args, {}), *caches][1:]
        args = compact(call.args)
        kwargs = {"scale": call.kwargs["scale"]} | ({"window": window} if window else {})
        runs = [args] if str(args[0].dtype) == "torch.float32" else [args, in_float(args)]
        self.exact = [self.ours(*copy, **kwargs) for copy in runs[1:]]
        return lambda: [quietly(theirs, copy, kwargs) for copy in runs]

    def compare(self, call: Call, expected: Any, got: Any) -> None:
        if call.name == "write_kv":
            wanted = [cache.index_select(0, self.blocks) for cache in call.args[:2]]
        else:
            wanted = [expected, *self.exact]
        for theirs, ours in zip(got, wanted, strict=True):
            need_close(theirs, ours)


def compact(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of an attention function over paged caches, which come second to fourth before the context lengths, over a
    copy that has only the blocks that rows use."""
    q, k_cache, v_cache, tables, lengths, *rest = args
    width = tables.new_tensor(range(tables.shape[1]))
    used, table = tables.masked_fill(width[None, :] * k_cache.shape[2] >= lengths[:, None], 0).unique(return_inverse=True)
    caches = (cache.index_select(0, used) for cache in (k_cache, v_cache))
    return q.clone(), *caches, table.to(tables.dtype), lengths.clone(), *(r.clone() for r in rest)


def in_float(args: Sequence[Any]) -> list[Any]:
    return [*(a.float() for a in args[:3]), *args[3:]]


def quietly(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call outside of autograd, which torch knows by thread. This room does not import torch: whose part it is has."""
    with sys.modules["torch"].inference_mode():
        return function(*args, **kwargs)


def need_close(theirs: Any, ours: Any, tolerance: float | None = None) -> None:
    """Tensors by tolerance: how far each first index (a token, a block) is off, as a share of its size."""
    for name in ("shape", "dtype"):
        need_equal(name, str(getattr(theirs, name, None)), str(getattr(ours, name)))
    allowed = tolerance or TOLERANCE[str(ours.dtype)]
    a, b = (x.double().reshape(len(x), -1) for x in (theirs, ours))
    off = (a - b).norm(dim=1) / (b.norm(dim=1) + 1e-30)
    wrong = (~(off <= allowed) & b.isfinite().all(1)).nonzero().reshape(-1).tolist()  # nobody knows better than NaN
    if wrong:
        i = wrong[0]
        at = int((a[i] - b[i]).abs().nan_to_num(float("inf")).argmax())
        where = f"{len(wrong)} of {len(ours)} are off, the first at index {i} by {float(off[i]):.2g} of its size"
        raise Differs(f"{float(a[i, at]):.6g} ({where})", f"{float(b[i, at]):.6g} ({allowed:g} is allowed in {ours.dtype})")


def difference(
    reference: Callable[..., Any], theirs: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any],
    tolerance: float | None = None,
) -> str | None:  # fmt: skip
    """Two functions of tensors on the same arguments, of which each gets a copy: what differs in one line, or None."""
    ours, yours = (quietly(f, [a.clone() if hasattr(a, "clone") else a for a in args], kwargs) for f in (reference, theirs))
    try:
        need_close(yours, ours, tolerance)
    except Differs as found:
        return f"yours: {found.args[0]}; the reference: {found.args[1]}"
    return None
