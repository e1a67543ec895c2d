"""Tokenizers from GGUF lists and from tokenizer.json: ids, BOS, end tokens, exact bytes."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

import tiny
from cutaway.checkpoints import hub, open_checkpoint
from cutaway.core.errors import BadRequest, CheckpointError
from cutaway.core.text_assets import TextAssets, Vocabulary
from cutaway.text.detokenizer import Detokenizer
from cutaway.text.tokenizer import Tokenizer

TEXTS = [
    "Hello world", "  leading", "trailing  ", "a\n\n\nb", "tab\t\tx", " 1234567 89", "héllo wörld ÀÉÎ", "日本語テキスト",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈", "don't I'll we've DON'T", "<|im_start|>user\nHi<|im_end|>\n", "\u0000\u0001\x7f", "ﬁ ² ½ Ⅷ ٣",
    "a\u0301 e\u0301", "\r\n\r\n", "    def f(x):\n        return x**2  # c\n", "...!!!???",
    "\u200b\u200d\ufeff", "\U0001d518\U0001d52b\U0001d526", "Ġ Ċ Ġword",
    "", "\n", " ", "한국어 문장입니다.", "a" * 300,
]  # fmt: skip


def gguf_tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.open(open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", "llama")).text())


def folder_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.open(open_checkpoint(folder).text())


def test_gguf_and_tokenizer_json_agree(tmp_path: Path) -> None:
    first, second = gguf_tokenizer(tmp_path), folder_tokenizer(tiny.write_folder(tmp_path / "f", "llama"))
    for text in TEXTS:
        assert first.encode(text) == second.encode(text)
        assert first.decode(first.encode(text), skip_special=False) == text
    assert first.vocab_size == second.vocab_size == 384
    assert first.bos_id == second.bos_id == 1
    assert first.eos_ids == {2} and second.eos_ids == {0, 2}


def test_bytes_of_tokens_join_to_the_text_also_inside_a_character(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path)
    randomness = random.Random(3)
    for text in [*TEXTS, "".join(chr(randomness.randrange(32, 0x3000)) for _ in range(200))]:
        ids = tokenizer.encode(text)
        joined = b"".join(tokenizer.token_bytes(id) for id in ids)
        assert joined == text.replace("<|im_start|>", "").replace("<|im_end|>", "").encode()
        assert joined.decode() == tokenizer.decode(ids)
    assert [tokenizer.token_bytes(id) for id in tokenizer.encode("é")] == [b"\xc3", b"\xa9"]
    assert tokenizer.token_text(tokenizer.encode("é")[0]) == "\ufffd"


def test_special_tokens_have_no_bytes_and_are_parsed_in_text(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert [tokenizer.is_special(id) for id in (0, 1, 2, 3)] == [True, True, True, False]
    assert tokenizer.token_bytes(1) == b"" and tokenizer.token_text(1) == "<|im_start|>"
    assert tokenizer.decode(ids) == "a" and tokenizer.decode(ids, skip_special=False) == "<|im_start|>a<|im_end|>"
    assert tokenizer.token_bytes(100_000) == b"" and tokenizer.token_text(100_000) == ""


def test_added_tokens_that_are_not_special_show_as_their_text(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, "llama")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("<tool é>", normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(BadRequest, match=r"holds '<tool é>', token 384, but the model knows only 384 tokens"):
        folder_tokenizer(folder).encode("a<tool é>b")
    tokenizer = Tokenizer.open(replace(open_checkpoint(folder).text(), vocab_size=385))
    ids = tokenizer.encode("a<tool é>b")
    assert 384 in ids and not tokenizer.is_special(384)
    assert b"".join(tokenizer.token_bytes(id) for id in ids).decode() == tokenizer.decode(ids) == "a<tool é>b"


def with_bos(folder: Path) -> Path:
    """The folder's tokenizer.json adds BOS by itself, as Llama 3's does."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def set_config(folder: Path, **values: Any) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_bos_stands_exactly_once(tmp_path: Path) -> None:
    plain = folder_tokenizer(tiny.write_folder(tmp_path / "plain", "llama"))
    assert plain.encode("a")[0] != 1
    own = folder_tokenizer(with_bos(tiny.write_folder(tmp_path / "own", "llama")))
    assert own.encode("a")[:1] == [1] and own.encode("a", special=False) == plain.encode("a")
    assert own.encode_rendered("<|im_start|>a") == [1, *plain.encode("a")]
    assert own.encode_rendered("a") == [1, *plain.encode("a")]
    set_on = folder_tokenizer(set_config(tiny.write_folder(tmp_path / "on", "llama"), add_bos_token=True))
    assert set_on.encode("a") == [1, *plain.encode("a")] and set_on.encode_rendered("<|im_start|>a") == [1, *plain.encode("a")]
    set_off = folder_tokenizer(set_config(with_bos(tiny.write_folder(tmp_path / "off", "llama")), add_bos_token=False))
    assert set_off.encode("a") == plain.encode("a")
    assert set_off.encode("<|im_start|>a") == [1, *plain.encode("a")]  # the one that the text itself has
    assert set_off.encode("") == [] and set_on.encode("") == [1]


def test_special_tokens_may_be_objects_or_stand_in_the_map(tmp_path: Path) -> None:
    folder = set_config(tiny.write_folder(tmp_path, "llama"), bos_token={"content": "<|im_start|>"}, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (folder / "generation_config.json").unlink()
    tokenizer = folder_tokenizer(set_config(folder, added_tokens_decoder=None))
    assert tokenizer.bos_id == 1 and tokenizer.eos_ids == {2}


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, "llama")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    assert len(folder_tokenizer(folder).encode("abcdefghijklmn")) == 14


def byte_level(pre: str, words: list[str]) -> Tokenizer:
    """A byte-level tokenizer whose vocabulary can spell each of `words` (in stand-in characters) as one token."""
    tokens, merges = tiny.byte_characters(), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    return Tokenizer.open(TextAssets("m", len(tokens), vocabulary=Vocabulary("gpt2", pre, tokens, merges=merges)))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(id) for id in tokenizer.encode(text)]


def test_each_kind_cuts_text_as_its_models_do() -> None:
    words = ["Ġ123", "123456", "Ġabc", "'LL", "!!", "ĠĠĠĠ", "Ċ", "(abc"]
    cut = {pre: pieces(byte_level(pre, words), "123456 123") for pre in ("smollm", "gpt-2", "llama-bpe", "qwen2", "default")}
    assert cut["gpt-2"] == ["123456", " 123"]
    assert cut["smollm"] == cut["qwen2"] == ["1", "2", "3", "4", "5", "6", " ", "1", "2", "3"]
    assert cut["llama-bpe"] == ["123", "4", "5", "6", " ", "123"]  # threes, of which only 123 is a token
    assert cut["default"] == ["123", "4", "5", "6", " ", "123"]
    assert pieces(byte_level("gpt-2", words), "I'LL (abc") == ["I", "'", "L", "L", " ", "(", "a", "b", "c"]
    assert pieces(byte_level("llama-bpe", words), "I'LL(abc") == ["I", "'LL", "(abc"]
    assert pieces(byte_level("tekken", ["aB", "AbC", "Bc"]), "aBcAbC") == ["a", "Bc", "Ab", "C"]


def test_llama_3_takes_whole_words_that_are_tokens() -> None:
    """A word in the vocabulary that no merge reaches."""
    tokens = [*tiny.byte_characters(), "xyz"]
    llama, gpt2 = (
        Tokenizer.open(TextAssets("m", 257, vocabulary=Vocabulary("gpt2", pre, tokens))) for pre in ("llama-bpe", "gpt-2")
    )
    assert llama.encode("xyz") == [256] and len(gpt2.encode("xyz")) == 3


def test_qwen_normalizes_to_nfc() -> None:
    assert byte_level("qwen2", []).encode("e\u0301") == byte_level("qwen2", []).encode("\u00e9")


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (
            Vocabulary("gpt2", "deepseek-coder", ["a"]),
            "pre-tokenizer 'deepseek-coder' is not supported; supported: ",
        ),
        (Vocabulary("bert", "default", ["a"]), "tokenizer model 'bert' is not supported; supported in GGUF: gpt2, llama"),
        (Vocabulary("gpt2", "gpt-2", ["a", "a"]), "the vocabulary has a token twice"),
        (Vocabulary("gpt2", "gpt-2", ["a", "b"], merges=["a c"]), "the tokenizer cannot be built"),
        (Vocabulary("gpt2", "gpt-2", ["a", "b"], merges=["ab"]), "the tokenizer cannot be built"),
        (Vocabulary("llama", "default", ["a", "b"]), "has 0 scores for 2 tokens"),
    ],
)
def test_vocabularies_that_cannot_be_used_get_one_line(vocabulary: Vocabulary, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.open(TextAssets("m.gguf", 2, vocabulary=vocabulary))
    assert message in str(caught.value) and "m.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_json_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(file))
    with pytest.raises(CheckpointError, match="neither byte-level BPE nor SentencePiece"):
        Tokenizer.open(TextAssets("m", 2, tokenizer_file=file))
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: the tokenizer cannot be built"):
        Tokenizer.open(TextAssets("m", 2, tokenizer_file=file))
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json"):
        Tokenizer.open(TextAssets("m", 2))


def sentencepiece(add_space_prefix: bool = True) -> TextAssets:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    scored = {
        "▁": -90.0,
        "a": -91.0,
        "b": -92.0,
        "c": -93.0,
        "ab": -1.0,
        "bc": -0.5,
        "abc": -2.0,
        "▁a": -3.0,
        "▁abc": -4.0,
        "é": -9.0,
    }
    scores = [0.0] * len(tokens) + list(scored.values())
    tokens += list(scored)
    vocabulary = Vocabulary(
        "llama", "default", tokens, types + [1] * len(scored), scores, unk_id=0, add_space_prefix=add_space_prefix
    )
    return TextAssets("m", len(tokens), vocabulary=vocabulary, bos_id=1, eos_ids=frozenset({2}), add_bos=True)


def best_pair(assets: TextAssets, text: str) -> list[str]:
    """SentencePiece's rule, written out: join the neighbours whose union has the best score, leftmost of equals."""
    assert assets.vocabulary is not None
    score = dict(zip(assets.vocabulary.tokens, assets.vocabulary.scores, strict=True))
    parts = list(text)
    while True:
        joins = [(score[a + b], -index) for index, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not joins:
            break
        index = -max(joins)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [piece for part in parts for piece in ([part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()])]


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes() -> None:
    assets = sentencepiece()
    tokenizer = Tokenizer.open(assets)
    assert assets.vocabulary is not None
    names = assets.vocabulary.tokens
    for text in ["abc", "aabbcc", "abcabc abc", "ca b", "日", "aé b日c", "a  b", "cab" * 20]:
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert [names[id] for id in ids[1:]] == best_pair(assets, "▁" + text.replace(" ", "▁")), text
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes(id) for id in ids) == (" " + text).encode()
    assert tokenizer.token_bytes(names.index("<0xE6>")) == b"\xe6"
    assert tokenizer.token_text(names.index("<0xE6>")) == "\ufffd"
    assert tokenizer.token_bytes(names.index("▁abc")) == b" abc"


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_a_stream_from_nothing_has_the_first_space_that_the_whole_decode_has(add_space_prefix: bool) -> None:
    tokenizer = Tokenizer.open(sentencepiece(add_space_prefix))
    assert tokenizer.strips_leading_space == add_space_prefix
    ids = tokenizer.encode("abc abc", special=False)
    detokenizer = Detokenizer(tokenizer, [1])
    assert "".join(detokenizer.push([id]) for id in ids) + detokenizer.finish() == tokenizer.decode(ids) == "abc abc"
    after_text = Detokenizer(tokenizer, [1, *ids])
    assert after_text.push(ids) + after_text.finish() == ("" if not add_space_prefix else " ") + "abc abc"


def test_sentencepiece_without_a_space_in_front() -> None:
    tokenizer = Tokenizer.open(sentencepiece(add_space_prefix=False))
    ids = tokenizer.encode("abc")
    assert b"".join(tokenizer.token_bytes(id) for id in ids).decode() == tokenizer.decode(ids) == "abc"


def test_bos_of_a_rendered_template_is_not_doubled() -> None:
    tokenizer = Tokenizer.open(sentencepiece())
    assert tokenizer.encode("abc")[0] == 1
    assert tokenizer.encode_rendered("<s>abc").count(1) == 1
    assert tokenizer.encode_rendered("abc").count(1) == 1
    assert tokenizer.encode("<s>abc").count(1) == 2  # a raw prompt gets what the tokenizer does by default
    assert Tokenizer.open(replace(sentencepiece(), add_bos=False)).encode("abc").count(1) == 0


def test_sentencepiece_from_tokenizer_json(tmp_path: Path) -> None:
    """Llama 2's shape of tokenizer.json gives the same bytes."""
    vocabulary = sentencepiece().vocabulary
    assert vocabulary is not None
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    backend = tokenizers.Tokenizer(models.BPE(ids, [("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    backend.decoder = decoders.Sequence(decoder)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(TextAssets("m", len(ids), tokenizer_file=tmp_path / "tokenizer.json"))
    assert b"".join(tokenizer.token_bytes(id) for id in tokenizer.encode("ab日 c")) == " ab日 c".encode()


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    model = hub.BUILTIN[0]
    return Tokenizer.open(open_checkpoint(hub.models_folder() / model.file).text())


@pytest.mark.model
def test_the_built_in_tokenizer_on_tricky_texts(smollm: Tokenizer) -> None:
    """The same ids as a tokenizer built as SmolLM2's own tokenizer.json is: single digits, then GPT-2's cutting."""
    vocabulary = open_checkpoint(hub.models_folder() / hub.BUILTIN[0].file).text().vocabulary
    assert vocabulary is not None
    merges = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    own = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary.tokens)}, merges))
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == 3])
    randomness = random.Random(0)
    alphabet = [
        "a",
        " ",
        "  ",
        "\n",
        "1",
        "٣",
        "é",
        "日",
        "👍",
        "'s",
        "'",
        "<|im_end|>",
        "\t",
        ".",
        " the",
        "Ⅷ",
        "\u00a0",
        "\u0301",
    ]
    mixed = ["".join(randomness.choice(alphabet) for _ in range(randomness.randrange(1, 40))) for _ in range(200)]
    for text in TEXTS + mixed:
        ids = smollm.encode(text)
        assert ids == own.encode(text).ids, text
        assert smollm.decode(ids, skip_special=False) == text
        assert b"".join(smollm.token_bytes(id) for id in ids).decode() == smollm.decode(ids)


@pytest.mark.model
def test_the_built_in_tokenizer_gives_the_known_ids(smollm: Tokenizer) -> None:
    assert smollm.encode("Hello 1234 wörld<|im_end|>") == [19556, 216, 33, 34, 35, 36, 267, 29989, 400, 2]
    assert (smollm.bos_id, smollm.eos_ids, smollm.vocab_size) == (1, {2}, 49152)
    assert smollm.encode("The")[0] != 1  # add_bos_token is false


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}],
                            "pair": [], "special_tokens": {}}},
        {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                            "single": [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}},
    ],
    ids=["normalizer", "second sequence", "unknown token"],
)  # fmt: skip
def test_a_tokenizer_that_panics_is_one_line(tmp_path: Path, change: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    file = tiny.write_folder(tmp_path, "llama") / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the tokenizer cannot be built: ") as error:
        folder_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""
