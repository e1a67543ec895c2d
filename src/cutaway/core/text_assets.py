"""`TextAssets`: what a checkpoint knows about text, handed from checkpoints to text without either importing the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as GGUF metadata describes it; ids are positions in `tokens`.

    model: "gpt2" (byte-level BPE: merges) or "llama" (SentencePiece BPE: scores, byte tokens <0xAB>).
    pre: how text is cut before merging ("smollm", "llama-bpe", "qwen2", ...). types: 1 normal, 2 unknown, 3 control,
    4 user-defined, 5 unused, 6 byte; empty: all normal. add_space_prefix: SentencePiece's leading space.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int] = field(default_factory=list[int])
    scores: list[float] = field(default_factory=list[float])
    merges: list[str] = field(default_factory=list[str])
    unk_id: int | None = None
    add_space_prefix: bool = True


@dataclass(frozen=True, slots=True)
class TextAssets:
    """All that `Tokenizer.open` and `ChatTemplate.open` need.

    Exactly one of tokenizer_file (a tokenizer.json) and vocabulary is set. vocab_size counts the model's embedding rows:
    ids at or above it do not exist for the model. add_bos None: as tokenizer.json's own post-processor does it.
    room: bytes of memory that the tokenizer may take, so that a small file cannot describe a vast one; None: any.
    special_tokens: "bos_token", "eos_token", ... -> text, as chat templates name them.
    """

    name: str
    vocab_size: int
    tokenizer_file: Path | None = None
    vocabulary: Vocabulary | None = None
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict[str, str])
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    add_bos: bool | None = None
    room: int | None = None
