"""transformers on the CPU as a peer of `cutaway bench cpu`, in a venv of its own.

It loads the model once and then answers one JSON object a line on standard input with one on standard output:

    {"op": "prefill", "ids": [...]}                        one forward pass, logits of the last token
    {"op": "decode", "rows": [[...], ...], "steps": n}     n greedy steps; their prompts are passed first and not counted
    {"op": "generate", "rows": [[...], ...], "tokens": n}  prompts and n tokens of each, as one batch
    -> {"seconds": s}

All rows of a batch have one length, so nothing is padded. The loop is written out (forward pass, argmax, DynamicCache): it
costs less than `generate`. "attention" in a message chooses transformers' implementation: "sdpa", its default, or "eager",
which is the faster one here for single tokens in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache


class Peer:
    def __init__(self, model: Path, dtype: torch.dtype):
        where: dict[str, Any] = {"pretrained_model_name_or_path": model}
        if model.is_file():
            where = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
        self.model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype).eval()

    def step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(dim=-1, keepdim=True)

    @torch.inference_mode()
    def run(self, rows: list[list[int]], steps: int) -> tuple[float, float]:
        """Seconds of the prompts' pass, and of `steps` greedy ones after it."""
        cache = DynamicCache(config=self.model.config)
        began = time.perf_counter()
        token = self.step(torch.tensor(rows), cache)
        between = time.perf_counter()
        for _ in range(steps):
            token = self.step(token, cache)
        return between - began, time.perf_counter() - between

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        self.model.set_attn_implementation(message.get("attention", "sdpa"))
        match message["op"]:
            case "prefill":
                return {"seconds": self.run([message["ids"]], 0)[0]}
            case "decode":
                return {"seconds": self.run(message["rows"], message["steps"])[1]}
            case "generate":
                return {"seconds": sum(self.run(message["rows"], message["tokens"] - 1))}
            case other:
                return {"error": f"no such op: {other}"}


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers as a peer; see the top of this file")
    parser.add_argument("model", type=Path, help="a .gguf file or a folder")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")  # whatever the libraries print goes to stderr
    os.dup2(2, 1)
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    began = time.perf_counter()
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    peer = Peer(arguments.model.resolve(), dtype)
    ready = {"transformers": transformers.__version__, "torch": torch.__version__, "load_seconds": time.perf_counter() - began}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
