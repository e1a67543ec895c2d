"""Shadow mode of attention: tensors are compared by tolerance, and of many calls a sample."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import tiny
from cutaway import LLM, SamplingParams
from cutaway.engine.shadow.closeness import difference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama")


def ids_of(model: Path, **settings: object) -> tuple[list[list[int]], dict[str, object]]:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    prompts = [[(7 * i + j * j) % 300 + 5 for j in range(3 + 12 * i)] for i in range(4)]
    with LLM(str(model), threads=1, kv_blocks=65, max_num_batched_tokens=48, **settings) as llm:
        return [a.token_ids for a in llm.generate(prompts, params)], llm.parts.report()["attention"].get("shadow", {})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "find", "replace", "said"),
    [
        ("the loop", "", "", None),
        ("float64", "q[i, h].float()", "q[i, h].double()", None),
        ("no mask", "end = length - (stop - start) + 1 + i - start", "end = length", "of its size"),
        ("the wrong key head", "h // group", "h % k_cache.shape[1]", "of its size"),
        ("no scale", "* scale", "* 1.0", "of its size"),
        ("another dtype", "out = torch.empty_like(q)", "out = torch.empty(q.shape, dtype=torch.float64)", "dtype"),
        ("rows for heads", "return out", "return out.transpose(0, 1)", "shape"),
        ("a slot off", "slots % size", "(slots + 1) % size", "write_kv"),
        ("writes its arguments", "return out", "q.zero_(), k_cache.fill_(7)\n    return out", None),
    ],
)
def test_attention_is_compared_by_tolerance(
    name: str, find: str, replace: str, said: str | None, dtype: str, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "attention.py"
    assert not find or LOOP.count(find) == 1
    file.write_text(LOOP.replace(find, replace) if find else LOOP)
    ids, report = ids_of(model, dtype=dtype, shadow={"attention": str(file)})
    assert ids == ids_of(model, dtype=dtype)[0]
    if said is None:
        assert report["difference"] is None
        assert 128 < report["compared"] < report["calls"]  # pyright: ignore
    else:
        assert said in str(report["difference"])


LOOP = """import torch


def write_kv(k_cache, v_cache, k, v, slots):
    size = k_cache.shape[2]
    assert k_cache.is_contiguous()
    k_cache[slots // size, :, slots.remainder(size)] = k
    v_cache[slots // size, :, slots % size] = v


def paged_attention(q, k_cache, v_cache, block_tables, context_lens, query_starts, *, scale):
    size, group = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    for row, length in enumerate(context_lens.tolist()):
        start, stop = query_starts[row], query_starts[row + 1]
        at = [(int(block_tables[row, p // size]), p % size) for p in range(length)]
        for i in range(start, stop):
            end = length - (stop - start) + 1 + i - start
            for h in range(q.shape[1]):
                kv = h // group
                k = torch.stack([k_cache[b, kv, o] for b, o in at[:end]])
                v = torch.stack([v_cache[b, kv, o] for b, o in at[:end]])
                one = q[i, h].float()
                weights = ((k.to(one.dtype) @ one) * scale).softmax(0)
                out[i, h] = (weights @ v.to(one.dtype)).to(out.dtype)
    return out
"""


@pytest.mark.parametrize("wrong", [None, "scale", "lengths"])
def test_any_pair_of_functions_is_compared(wrong: str | None) -> None:
    """Stage 08's kernel, in the interpreter, beside stage 07."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no triton here: it exists for Linux alone")
    import torch

    from cutaway.backends.torch import attention
    from cutaway.backends.torch.kernels.paged_decode import paged_decode

    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=draw) for shape in ((3, 4, 16), (9, 2, 16, 16), (9, 2, 16, 16)))
    tables = torch.tensor([[3, 1, 5], [8, 0, 0], [2, 7, 4]], dtype=torch.int32)
    lengths = torch.tensor([37, 16, 48], dtype=torch.int32)

    def gathered(q: Any, k: Any, v: Any, tables: Any, lengths: Any, *, scale: float) -> Any:
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        return attention.paged_attention(q, k, v, tables, lengths, starts, scale=scale)

    def theirs(q: Any, k: Any, v: Any, tables: Any, lengths: Any, *, scale: float) -> Any:
        lengths = lengths - (lengths == 37).int() if wrong == "lengths" else lengths
        return paged_decode(q, k, v, tables, lengths, scale=1.0 if wrong == "scale" else scale)

    if torch.cuda.is_available():
        pytest.skip("the gather attention is for CPUs")
    found = difference(gathered, theirs, (q, k, v, tables, lengths), {"scale": 0.25})
    said = {"scale": "(3 of 3 are off", "lengths": "(1 of 3 are off, the first at index 0"}
    assert found is None if wrong is None else said[wrong] in (found or "")
    assert difference(gathered, theirs, (q, k, v, tables, lengths), {"scale": 0.25}, tolerance=9.0) is None
