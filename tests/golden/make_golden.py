"""Makes the golden files of this folder with Hugging Face transformers, the engine's oracle for whole models.

It needs a venv with torch, transformers and gguf; transformers is no dependency of the project:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch==2.13.0 transformers==5.24.0 gguf sentencepiece
    /tmp/golden/bin/python tests/golden/make_golden.py [--only smollm2|tiny]

`smollm2.json/.npz`: the built-in model, dequantized to float32. `tiny.json/.npz`: the small seeded models of
`tests/tiny.py`, one a kind of architecture. For each prompt: its ids, the greedy ids with the margin between the two highest
logits at each, the 50 highest logits of every row, and the whole row that the first id came from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

HERE = Path(__file__).resolve().parent
MODELS = Path(os.environ.get("CUTAWAY_HOME", Path.home() / ".cache" / "cutaway")) / "models"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS, TINY_NEW_TOKENS, TOP = 48, 32, 50
TINY_LENGTHS = (5, 16, 61)  # the last one is longer than the sliding window of tiny mistral
WHOLE = ("long", "chat", "blocks", "unicode")  # cases of the built-in model with a whole row: 200 kB each
HASHED = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.17.self_attn.v_proj.weight",
    "model.layers.29.mlp.down_proj.weight",
    "model.layers.29.post_attention_layernorm.weight",
    "model.norm.weight",
)

LONG = """A lighthouse keeper counts the ships that pass in the night. He writes each one down in a ledger: the hour, the \
heading, the number of lamps, and whether she answered his signal. After forty years the ledger has grown to eleven \
volumes. A young clerk from the harbour office comes to see them, for the office has decided that the light shall be \
worked by a machine from the spring on, and nobody will live on the rock. The clerk asks what the volumes are good for. \
The keeper thinks about it while the kettle boils. "In the year of the great storm," he says at last, "three ships went \
by within one hour, all without lamps, and none of them ever came into any port. I wrote to the owners. They answered \
that no such ships had ever sailed." He turns the pages until he has found the place. The ink is brown by now, and the \
hand is that of a much younger man. "You may take the other ten," he says, "but this one I shall keep, because I am \
still waiting for their signal." The clerk puts down his cup and looks through the window at the sea, where"""
CODE = '''def binary_search(values: list[int], target: int) -> int:
    """Return the index of target in the sorted list, or -1 if it is not there."""
    low, high = 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        if values[middle] == target:
            return middle
'''
UNICODE = (
    "Die Bäckerei öffnet um 7 Uhr. 東京は日本の首都です。 Привет, мир! 🎉🚀 naïve café — ½ \u00d7 3 = 1½; translate to English:"
)
CHAT = [{"role": "user", "content": "Name three colours of the rainbow, and say which one is the warmest."}]
CHAT_TURNS = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Where do penguins live?"},
    {"role": "assistant", "content": "Penguins live in the Southern Hemisphere."},
    {"role": "user", "content": "And polar bears?"},
]

TEXTS = (  # what tokenizers get wrong: empty text, runs of spaces, digits, combining marks, joined emoji, control tokens
    "",
    " ",
    "Hello  12 worlds\n\n\tof 3,141.59 don't they've",
    "e\u0301 é 漢字 🎉👩\u200d👩\u200d👧 123",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a <|im_end|> b",
    "   leading and trailing   ",
    "x\r\ny\u00a0z\u200b",
    "\uff21\uff22\uff23 \ufb01 ½ \u0663",
)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """Ids chosen one at a time with the key/value cache, and the logits float32 [count, vocabulary] they came from."""
    cache, rows, ids = None, [], []
    step = torch.tensor([prompt])
    for _ in range(count):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0, -1].float().numpy())
        ids.append(int(rows[-1].argmax()))
        step = torch.tensor([[ids[-1]]])
    # The cached run must agree with one pass over everything, or the oracle itself is in doubt.
    whole = model(input_ids=torch.tensor([prompt + ids[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :].float().numpy()
    difference = float(np.abs(whole - np.stack(rows)).max())
    assert difference < 5e-4, f"cached and whole passes differ by {difference}"
    return ids, np.stack(rows)


def margins(rows: np.ndarray) -> list[float]:
    top = np.sort(rows, axis=1)[:, -2:]
    return [round(float(m), 6) for m in top[:, 1] - top[:, 0]]


def record(case: dict[str, Any], arrays: dict[str, np.ndarray], ids: list[int], rows: np.ndarray) -> None:
    """Puts the answer into `case`, and the first row of logits and the highest of every row into `arrays`."""
    case["greedy"], case["margins"] = ids, margins(rows)
    top = np.argsort(-rows, axis=1, kind="stable")[:, :TOP]
    arrays[f"{case['name']}.first"] = rows[0]
    arrays[f"{case['name']}.top_ids"] = top.astype(np.uint16)
    arrays[f"{case['name']}.top"] = np.take_along_axis(rows, top, axis=1)


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}


def fingerprint(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, dtype=np.float32).tobytes()).hexdigest()


def smollm2_tokenizer() -> Any:
    """transformers builds a tokenizer from GGUF with a plain byte-level split; the model's own takes digits apart first."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS, gguf_file=GGUF)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return tokenizer


def smollm2_cases(tokenizer: Any) -> list[dict[str, Any]]:
    def text(name: str, prompt: str) -> dict[str, Any]:
        return {"name": name, "text": prompt, "ids": tokenizer(prompt).input_ids}

    def chat(name: str, messages: list[dict[str, str]]) -> dict[str, Any]:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
        return {"name": name, "messages": messages, "rendered": rendered, "ids": ids}

    cases = [text("short", "The capital of France is"), text("long", LONG), text("code", CODE), text("unicode", UNICODE),
             chat("chat", CHAT), chat("chat-turns", CHAT_TURNS)]  # fmt: skip
    exact = tokenizer(LONG).input_ids[: 16 * 4]
    cases.append({"name": "blocks", "ids": exact})  # ends exactly at the end of a block of 16
    assert len(cases[1]["ids"]) > 200
    return cases


def make_smollm2() -> None:
    tokenizer = smollm2_tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS, gguf_file=GGUF, dtype=torch.float32).eval()
    weights = dict(model.named_parameters())
    meta: dict[str, Any] = {
        "model": GGUF,
        "versions": versions(),
        "weights": {name: fingerprint(weights[name].detach().numpy()) for name in HASHED},
        "cases": smollm2_cases(tokenizer),
        "texts": [{"text": text, "ids": tokenizer(text).input_ids} for text in TEXTS],
    }
    arrays: dict[str, np.ndarray] = {}
    for case in meta["cases"]:
        name = case["name"]
        record(case, arrays, *greedy(model, case["ids"], NEW_TOKENS))
        case["answer"] = tokenizer.decode(case["greedy"])
        if name not in WHOLE:
            del arrays[f"{name}.first"]
        print(f"{name:12} {len(case['ids']):4} ids, smallest margin {min(case['margins']):.4f}: {case['answer'][:60]!r}")
    write("smollm2", meta, arrays)


def make_tiny() -> None:
    sys.path.insert(0, str(HERE.parent))
    import tiny

    meta: dict[str, Any] = {"versions": versions(), "cases": []}
    arrays: dict[str, np.ndarray] = {}
    for name in tiny.NAMES:
        with tempfile.TemporaryDirectory() as folder:
            path = tiny.write_folder(Path(folder), name)
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for length in TINY_LENGTHS:
            prompt = np.random.default_rng(length).integers(3, model.config.vocab_size, length).tolist()
            case = {"name": f"{name}-{length}", "model": name, "ids": prompt}
            record(case, arrays, *greedy(model, prompt, TINY_NEW_TOKENS))
            meta["cases"].append(case)
            print(f"{case['name']:16} smallest margin {min(case['margins']):.4f}, {len(set(case['greedy']))} different ids")
    write("tiny", meta, arrays)


def write(stem: str, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    (HERE / f"{stem}.json").write_text(json.dumps(meta, ensure_ascii=False, separators=(",", ":")) + "\n")
    np.savez_compressed(HERE / f"{stem}.npz", **arrays)
    size = sum((HERE / f"{stem}.{end}").stat().st_size for end in ("json", "npz"))
    print(f"{stem}: {size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["smollm2", "tiny"])
    only = parser.parse_args().only
    torch.set_num_threads(1)
    for name, make in {"smollm2": make_smollm2, "tiny": make_tiny}.items():
        if only in (None, name):
            make()


if __name__ == "__main__":
    main()
