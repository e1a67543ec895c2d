"""The detokenizer on the built-in model's own vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from cutaway.checkpoints import open_checkpoint, resolve
from cutaway.text.detokenizer import Detokenizer
from cutaway.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "Hello, world.",
    "日本語のテキスト、漢字。",
    "👨‍👩‍👧‍👦 🇯🇵 👋🏽",
    " lead\n\n\ttabs  ",
    "Ünïcödé — “q”",
    "한국어 العربية हिन्दी",
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(open_checkpoint(resolve("smollm2-135m-instruct")).text())


@pytest.mark.parametrize("text", TEXTS)
def test_the_stream_is_the_text_and_shows_no_half_character(tokenizer, text):
    ids = tokenizer.encode(text, special=False)
    detok = Detokenizer(tokenizer, [1])
    pieces = [detok.push([i]) for i in ids]
    assert not any("\ufffd" in p for p in pieces)
    assert detok.finish() == ""
    assert detok.text == text == tokenizer.decode(ids)


def test_random_ids_give_the_whole_decode(tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(60):
        ids = rng.integers(0, tokenizer.vocab_size, 40).tolist()
        detok = Detokenizer(tokenizer, [1])
        shown = "".join(detok.push([i]) for i in ids) + detok.finish()
        assert shown == detok.text == tokenizer.decode(ids)


def test_a_stop_string_of_several_tokens(tokenizer):
    text = "First line.\n\nUser: and so on"
    detok = Detokenizer(tokenizer, [1], ["\n\nUser:"])
    shown = "".join(detok.push([i]) for i in tokenizer.encode(text, special=False)) + detok.finish()
    assert (shown, detok.stop_reason) == ("First line.", "\n\nUser:")
