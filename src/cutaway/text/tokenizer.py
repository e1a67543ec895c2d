"""`Tokenizer`: text <-> ids, and the exact bytes behind each id. The work is done by the tokenizers library."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken

from cutaway.core.errors import BadRequest, CheckpointError
from cutaway.core.text_assets import TextAssets
from cutaway.text.vocabulary import build

# memory that tokenizer.json takes, as measured: for a byte of a long string, the most; for a token or merge, which has a comma
_PER_BYTE, _PER_ITEM, _LONG = 80, 288, 32
TRIAL = "Hello, 1 world.\n"


def _byte_of() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2's bytes_to_unicode) -> the byte each stands for."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    rest = (byte for byte in range(256) if byte not in set(plain))
    return table | {chr(256 + index): byte for index, byte in enumerate(rest)}


def _kind(name: str, backend: tokenizers.Tokenizer) -> str:
    """ "bytes" (byte-level BPE) or "pieces" (SentencePiece), as the decoder tells."""
    decoder = str(backend.decoder)
    if "ByteLevel" in decoder:
        return "bytes"
    if "ByteFallback" in decoder or "Metaspace" in decoder or "▁" in decoder:
        return "pieces"
    raise CheckpointError(f"{name}: its tokenizer is neither byte-level BPE nor SentencePiece; those two are supported")


def _check_size(file: Path, room: int | None) -> None:
    """An error for a tokenizer.json that would take more than `room` bytes, by estimate, once the library has read it."""
    size = file.stat().st_size
    if room is None or size * _PER_BYTE <= room:
        return
    if size <= room:
        text = np.frombuffer(file.read_bytes(), np.uint8)
        quotes = np.flatnonzero((text[1:] == ord('"')) & (text[:-1] != ord("\\")))
        gaps = np.diff(quotes)  # strings, and what lies between them
        needed = int((text == ord(",")).sum()) * _PER_ITEM + int(gaps[gaps > _LONG].sum()) * _PER_BYTE + size
        if needed <= room:
            return
    raise CheckpointError(f"{file}: takes more memory than a model of this size should need")


def _line(error: BaseException) -> str:
    """The library's words: it raises plain Exception, and a panic of Rust's is a BaseException. Raises anything else again."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return " ".join(str(error).split())[:200]


@contextmanager
def _quiet() -> Generator[None]:
    """Standard error to nowhere: Rust writes a panic's backtrace there before Python hears of it."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class Tokenizer:
    """vocab_size: ids the model knows. eos_ids: every id that ends an answer. bos_id: the id that starts a text, if any.

    >>> tokenizer = Tokenizer.open(open_checkpoint(path).text())
    >>> tokenizer.decode(tokenizer.encode("Hello"))
    'Hello'
    """

    def __init__(self, backend: tokenizers.Tokenizer, assets: TextAssets):
        self._backend = backend
        self._decoder_kind = _kind(assets.name, backend)
        self._byte_of = _byte_of()
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = assets.vocab_size
        special = assets.special_tokens
        self.bos_id = assets.bos_id if assets.bos_id is not None else self._id(special.get("bos_token"))
        eos = self._id(special.get("eos_token"))
        self.eos_ids = assets.eos_ids | (frozenset() if eos is None else {eos})
        self._add_bos = assets.add_bos

    @cached_property
    def longest(self) -> int:
        """Most characters that one token can stand for."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @property
    def strips_leading_space(self) -> bool:
        """Whether `decode` drops the space that SentencePiece puts in front of a text's first word."""
        space = self._backend.token_to_id("▁") if self._decoder_kind == "pieces" else None
        return space is not None and self._backend.decode([space]) == ""

    @classmethod
    def open(cls, assets: TextAssets) -> Tokenizer:
        """From tokenizer.json or from GGUF's lists; CheckpointError in one line if neither can be used."""
        try:
            if assets.vocabulary is not None:
                backend = build(assets.name, assets.vocabulary, assets.room)
            elif assets.tokenizer_file is not None:
                _check_size(assets.tokenizer_file, assets.room)
                with _quiet():
                    backend = tokenizers.Tokenizer.from_file(str(assets.tokenizer_file))
                    backend.no_padding()
                    backend.no_truncation()
                    backend.encode(TRIAL)  # what is wrong with a post-processor shows here and not at the first request
            else:
                raise CheckpointError(f"{assets.name}: has no tokenizer.json")
        except CheckpointError:
            raise
        except BaseException as error:
            where = assets.tokenizer_file or assets.name
            raise CheckpointError(f"{where}: the tokenizer cannot be built: {_line(error)}") from error
        return cls(backend, assets)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`; control tokens in it are parsed. special: add BOS, or not, as the tokenizer does by default.

        BadRequest for a token that the tokenizer has and the model has not (fine-tunes that added tokens to one alone).
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=special and self._add_bos is None).ids
        except BaseException as error:
            raise BadRequest(f"the model's tokenizer cannot encode this text: {_line(error)}") from error
        if special and self._add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if ids and max(ids) >= self.vocab_size:
            token = self._backend.id_to_token(max(ids))
            raise BadRequest(f"the text holds {token!r}, token {max(ids)}, but the model knows only {self.vocab_size} tokens")
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered chat template: as `encode`, and one BOS, not two, if the template wrote it."""
        return self.encode(text, special=not self._starts_with_bos(text))

    def _starts_with_bos(self, text: str) -> bool:
        bos = None if self.bos_id is None else self._backend.id_to_token(self.bos_id)
        return bool(bos) and text.startswith(bos)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Ids without a token are nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def is_special(self, id: int) -> bool:
        """Whether the id is a control token, which never shows in an answer's text."""
        return id in self._special

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes that a token adds to a text; b"" for control tokens and for ids without a token.

        SentencePiece's decoder strips one space at the start of a text; here the space is kept.
        """
        token = None if id in self._special else self._backend.id_to_token(id)
        return b"" if token is None else self._to_bytes(token)

    def token_text(self, id: int) -> str:
        """A token for human eyes, control tokens included; bytes that are no UTF-8 alone show as U+FFFD."""
        token = self._backend.id_to_token(id)
        if token is None:
            return ""
        return token if id in self._special else self._to_bytes(token).decode("utf-8", "replace")

    def _to_bytes(self, token: str) -> bytes:
        if self._decoder_kind == "bytes":
            try:
                return bytes([self._byte_of[char] for char in token])
            except KeyError:  # an added token, which is plain text
                return token.encode("utf-8")
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace("▁", " ").encode("utf-8")
