"""Making a torch backend: an attention of one's own, settings that cannot be, weights from a config alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tiny
from cutaway.backends.torch.layers import rotary_table
from cutaway.backends.torch.runner import create
from cutaway.core.errors import CutawayError
from cutaway.engine.config import EngineConfig
from cutaway.engine.parts import Parts
from plans import OTHERS, PROMPT, Seen, alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("tiny") / "llama", "llama")


OWN_ATTENTION = """
import torch


def write_kv(k_cache, v_cache, k, v, slots):
    size = k_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        k_cache[slot // size, :, slot % size] = k[token]
        v_cache[slot // size, :, slot % size] = v[token]


def paged_attention(q, k_cache, v_cache, block_tables, context_lens, query_starts, *, scale):
    out = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[1]
    for row, context in enumerate(context_lens.tolist()):
        first, stop = query_starts[row].item(), query_starts[row + 1].item()
        k, v = (c[block_tables[row].long()].movedim(1, 2).flatten(0, 1)[:context] for c in (k_cache, v_cache))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[first:stop], k) * scale
        last = context - (stop - first) + torch.arange(stop - first)
        scores = scores.masked_fill(torch.arange(context) > last[:, None], -torch.inf)
        out[first:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out
"""


def test_an_attention_of_the_contract_alone_takes_its_place(folder, tmp_path):
    (tmp_path / "own.py").write_text(OWN_ATTENTION)
    seen = Seen(folder, parts={"attention": str(tmp_path / "own.py")})
    hand = seen.hand()
    rows = [hand.admit(prompt) for prompt in OTHERS]
    hand.step(*((row, min(row.pending, 20)) for row in rows))
    for row in rows:
        hand.generate(row, 5 - (len(row.tokens) - row.num_prompt))
    assert [row.tokens[row.num_prompt :] for row in rows] == [alone(folder, prompt, 5)[0] for prompt in OTHERS]
    assert not seen.parts.fallbacks


def test_a_model_with_windows_takes_the_reference_for_an_attention_without(tmp_path):
    folder = tiny.write_folder(tmp_path / "mistral", "mistral")
    (tmp_path / "own.py").write_text(OWN_ATTENTION)
    seen = Seen(folder, parts={"attention": str(tmp_path / "own.py")})
    hand = seen.hand()
    assert hand.generate(hand.admit(PROMPT), 5) == alone(folder, PROMPT, 5)[0]
    assert seen.parts.fallbacks == {"attention": {"sliding_window"}}


def refusal(model, **settings):
    with pytest.raises(CutawayError) as error:
        create(EngineConfig(model=str(model), **({"threads": 1} | settings)), Parts())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_settings_that_cannot_be(folder):
    assert "--kv-blocks must be at least 2" in refusal(folder, kv_blocks=1)
    assert "--kv-blocks" in refusal(folder, kv_blocks=10**9)
    assert "--max-model-len must be from 2 to 512" in refusal(folder, max_model_len=513)
    assert "--max-model-len" in refusal(folder, max_model_len=1)
    assert "--dtype must be one of auto, bf16, fp32, got fp8" in refusal(folder, dtype="fp8")


def test_dummy_weights_need_a_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("qwen3")))
    seen = Seen(tmp_path, load_format="dummy", dtype="bf16")
    hand = seen.hand()
    row = hand.admit(PROMPT)
    assert len(hand.generate(row, 3)) == 3 and np.isfinite(seen.logits).all()


def test_facts(folder):
    facts = Seen(folder, dtype="bf16", kv_blocks=32, max_model_len=100).backend.info()
    assert facts["window"] == 100 and facts["kv_blocks"] == 32 and facts["threads"] == 1 and facts["load_seconds"] >= 0
    matrices = sum(int(np.prod(shape)) for shape in tiny.shapes("llama").values() if len(shape) == 2)
    assert facts["weight_bytes"] == 2 * matrices and facts["kv_bytes"] == 32 * 2 * 2 * 2 * 16 * 16 * 2


def test_the_last_position_of_the_window(folder):
    seen = Seen(folder, max_model_len=64)
    hand = seen.hand()
    row = hand.admit(PROMPT)
    assert hand.generate(row, 12) == alone(folder, PROMPT, 12)[0]
    assert len(row.tokens) == 65 and row.computed == 64  # the last one is sampled and never computed


def test_a_long_window_costs_nothing_until_it_is_used(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("llama") | {"max_position_embeddings": 2**24}))
    backend = create(EngineConfig(model=str(tmp_path), load_format="dummy", kv_blocks=40, threads=1), Parts())
    assert len(backend.model.turns) < 5000
    assert backend.window == 39 * 16
    assert backend.info()["window"] == 2**24


def test_the_rotary_table_grows_to_what_it_would_have_been(folder):
    model = Seen(folder).backend.model
    first = model.turns.clone()
    grown = model._turns(2 * len(first) + 1)
    assert len(grown) == 4 * len(first)
    whole = rotary_table(model.config, 0, len(grown))
    assert (grown == whole).all() and (grown[: len(first)] == first).all()
