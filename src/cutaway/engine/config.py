"""What a person can set of an engine. One object from the command line, `LLM(...)` and the server to the engine process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; None means: chosen at start, and printed.

    model                   path of a folder or a .gguf file, a built-in name (`cutaway models`) or a hub id
    dtype                   "auto" (bf16 on a CPU), "bf16", "fp32"
    max_model_len           window in tokens; default: the model's own
    kv_blocks               blocks of 16 tokens; default on a CPU: min(25% of free memory, 16 windows)
    max_num_seqs            rows a step (16 on a CPU)
    max_num_batched_tokens  token budget of a step (512 on a CPU)
    prefix_cache            share computed blocks between requests
    preemption              what a request that gave its blocks back does on its return: "recompute" them, or have them
                            written back from a copy on the host ("swap")
    depth                   plans in flight beyond the one being collected (0 on a CPU)
    backend                 import string of a function `create(config: EngineConfig) -> Backend`
    parts                   part -> import string or file, in place of the engine's own
    shadow                  part -> file that runs beside the engine's own and is compared with it (`engine/shadow`)
    trace                   file to which each step is written (JSONL)
    load_format             "auto", or "dummy": random weights from config.json alone
    """

    model: str = "smollm2-135m-instruct"
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    max_model_len: int | None = None
    kv_blocks: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    prefix_cache: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    depth: int = 0
    backend: str = "cutaway.backends.torch.runner:create"
    parts: dict[str, str] = field(default_factory=dict[str, str])
    shadow: dict[str, str] = field(default_factory=dict[str, str])
    trace: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    threads: int | None = None
