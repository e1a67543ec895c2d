"""Cutaway: an LLM inference engine that you can see into and rebuild.

>>> from cutaway import LLM, SamplingParams
>>> LLM().generate("The capital of France is", SamplingParams(max_tokens=5, temperature=0))  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutaway.core.request import SamplingParams
    from cutaway.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the front must start without importing what only the engine process needs.
    if name == "LLM":
        from cutaway.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from cutaway.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'cutaway' has no attribute {name!r}")
