"""GGUF's token lists -> a tokenizer of the tokenizers library: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

The cutting patterns are those of the models' own tokenizers, as llama.cpp names them in tokenizer.ggml.pre.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from cutaway.core.errors import CheckpointError
from cutaway.core.text_assets import Vocabulary

_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5
_PARSED = (_UNKNOWN, _CONTROL, _USER)
_LONGEST_MERGED = 64  # characters; SentencePiece's own limit is 16 by default, and longer pieces stand for themselves

# memory of a tokenizer in bytes, as measured, the lists that describe it included
_PER_TOKEN, _PER_MERGE, _PER_BYTE = 320, 256, 8
_PER_SPECIAL, _PER_SPECIAL_BYTE = 1024, 96  # tokens that are looked for in every text, by an automaton

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# pre -> patterns applied in turn, each cutting what the one before left
_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token is taken whole, whatever the merges say


class _Room:
    """Bytes that may still be taken for a vocabulary. A small file can describe one that takes a hundred times its size."""

    def __init__(self, name: str, room: int | None):
        self.name, self.left = name, room

    def take(self, size: int) -> None:
        if self.left is not None:
            self.left -= size
            if self.left < 0:
                raise CheckpointError(f"{self.name}: the vocabulary takes more memory than a model of this size should need")


def build(name: str, vocabulary: Vocabulary, room: int | None = None) -> tokenizers.Tokenizer:
    """The tokenizer, with control (3) and user-defined (4) tokens parsed in text. CheckpointError names what is unknown.

    room: bytes of memory that it may take, by estimate; None: any.
    """
    left = _Room(name, room)
    left.take(len(vocabulary.tokens) * _PER_TOKEN + len(vocabulary.merges) * _PER_MERGE)
    for token, kind in zip(vocabulary.tokens, vocabulary.types or [1] * len(vocabulary.tokens), strict=False):
        size = len(token) if token.isascii() else 4 * len(token)
        left.take(_PER_SPECIAL + _PER_SPECIAL_BYTE * size if kind in _PARSED else _PER_BYTE * size)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise CheckpointError(f"{name}: the vocabulary has a token twice")
    if vocabulary.model == "gpt2":
        backend = _byte_level(name, vocabulary, ids)
    elif vocabulary.model == "llama":
        backend = _sentencepiece(name, vocabulary, ids, left)
    else:
        raise CheckpointError(f"{name}: tokenizer model {vocabulary.model!r} is not supported; supported in GGUF: gpt2, llama")
    control = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=False) if kind in (_UNKNOWN, _CONTROL)]
    user = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=False) if kind == _USER]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control if token])
    backend.add_tokens([AddedToken(token, normalized=False) for token in user if token])
    return backend


def _byte_level(name: str, vocabulary: Vocabulary, ids: dict[str, int]) -> tokenizers.Tokenizer:
    patterns = _PATTERNS.get(vocabulary.pre)
    if patterns is None:
        known = ", ".join(sorted(_PATTERNS))
        raise CheckpointError(f"{name}: pre-tokenizer {vocabulary.pre!r} is not supported; supported: {known}")
    merges: list[tuple[str, str]] = []
    for merge in vocabulary.merges:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    # ids keep their places; unused ones must not be found by a whole-word look-up
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=False):
        if kind == _UNUSED:
            del ids[token]
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=vocabulary.pre in _WHOLE_WORDS))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if vocabulary.pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(name: str, vocabulary: Vocabulary, ids: dict[str, int], room: _Room) -> tokenizers.Tokenizer:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{name}: has {len(vocabulary.scores)} scores for {len(vocabulary.tokens)} tokens")
    merges = _merges(vocabulary, ids, room)
    unknown = None if vocabulary.unk_id is None else vocabulary.tokens[vocabulary.unk_id]
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = vocabulary.add_space_prefix
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if prefix else steps)
    strip: list[Any] = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges(vocabulary: Vocabulary, ids: dict[str, int], room: _Room) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union has the best score; BPE joins by rank. So each way to cut a piece
    into two pieces becomes a merge, ranked by the whole's score, ties by the smaller ids."""
    tokens, types = vocabulary.tokens, vocabulary.types or [1] * len(ids)
    lefts, rights, wholes = array("i"), array("i"), array("i")
    for whole, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != 1 or len(token) > _LONGEST_MERGED:
            continue
        before = len(wholes)
        for cut in range(1, len(token)):
            left = ids.get(token[:cut])
            right = None if left is None else ids.get(token[cut:])
            if left is not None and right is not None:
                lefts.append(left)
                rights.append(right)
                wholes.append(whole)
        room.take((len(wholes) - before) * _PER_MERGE)
    scores = np.array(vocabulary.scores, np.float64)[np.asarray(wholes, np.int64)]
    order = np.lexsort((np.asarray(rights), np.asarray(lefts), -scores))
    return [(tokens[lefts[at]], tokens[rights[at]]) for at in order.tolist()]
