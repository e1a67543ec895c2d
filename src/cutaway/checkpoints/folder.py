"""`FolderCheckpoint`: a Hugging Face folder — config.json, safetensors, tokenizer, chat template, generation defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from cutaway.checkpoints.checkpoint import Array, DType, DummyCheckpoint
from cutaway.checkpoints.disk import unreadable
from cutaway.checkpoints.layout import check_tensors
from cutaway.checkpoints.parse import MAX_JSON, ROOM, parse_config, parse_generation, read_json
from cutaway.checkpoints.safetensors import open_weights
from cutaway.core.errors import CheckpointError
from cutaway.core.text_assets import TextAssets

_MAX_TEMPLATE = 1 << 20
_MAX_SMALL = 256 << 10  # of config.json and the like, which have some kilobytes
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """Names of special tokens -> their text, later sources first; an entry may be a string or an object with `content`."""
    answer: dict[str, str] = {}
    for source in sources:
        for key in _SPECIAL:
            value: Any = source.get(key)
            if isinstance(value, dict):
                value = cast(dict[str, Any], value).get("content")
            if isinstance(value, str):
                answer[key] = value
    return answer


def _ids_of(special: dict[str, str], tokenizer: dict[str, Any]) -> dict[str, int]:
    """Text -> id of the special tokens that tokenizer_config.json adds."""
    answer: dict[str, int] = {}
    added: Any = tokenizer.get("added_tokens_decoder")
    if isinstance(added, dict):
        for index, token in cast(dict[str, Any], added).items():
            if index.isdecimal() and len(index) < 10 and isinstance(token, dict):
                content = cast(dict[str, Any], token).get("content")
                if content in special.values():
                    answer[str(content)] = int(index)
    return answer


def _named_template(template: Any) -> str | None:
    """A template given as a string, or the one named "default" of a list."""
    if isinstance(template, list):
        entries = [cast(dict[str, Any], entry) for entry in cast(list[Any], template) if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) and template else None


class Folder:
    """The JSON side of a model's folder: configuration, generation defaults and text assets, without weights."""

    def __init__(self, path: Path):
        self.path = path
        self.name = path.absolute().name or str(path)
        config = read_json(path / "config.json", _MAX_SMALL)
        self.config = parse_config(str(path / "config.json"), config)
        tokenizer = self._optional("tokenizer_config.json", MAX_JSON)  # not kept: it may be large
        self._special = _special_tokens(self._optional("special_tokens_map.json"), tokenizer)
        self._added = _ids_of(self._special, tokenizer)
        self._template = _named_template(tokenizer.get("chat_template"))
        add_bos: Any = tokenizer.get("add_bos_token")
        self._add_bos = add_bos if isinstance(add_bos, bool) else None
        eos = self._special.get("eos_token")
        ids = frozenset() if eos is None else frozenset({self._added[eos]} if eos in self._added else ())
        generation = self._optional("generation_config.json")
        self.generation = parse_generation(str(path / "generation_config.json"), config, generation, ids)

    def _optional(self, name: str, limit: int = _MAX_SMALL) -> dict[str, Any]:
        return read_json(self.path / name, limit) if (self.path / name).exists() else {}

    def _chat_template(self) -> str | None:
        """chat_template.jinja first, as transformers has it; else what tokenizer_config.json has."""
        file = self.path / "chat_template.jinja"
        try:
            if file.exists():
                if file.stat().st_size > _MAX_TEMPLATE:
                    raise CheckpointError(f"{file}: has {file.stat().st_size} bytes; at most {_MAX_TEMPLATE} are allowed")
                return file.read_text(encoding="utf-8")
        except OSError as error:
            raise unreadable(file, error) from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file}: cannot be read as UTF-8 text") from error
        return self._template

    def _room(self) -> int:
        """Bytes that the tokenizer may take: the files' size and some."""
        return ROOM + sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())

    def text(self) -> TextAssets:
        """See `Checkpoint.text`; an error if there is no tokenizer.json."""
        file = self.path / "tokenizer.json"
        if not file.exists():
            hint = " (only tokenizer.model; convert it with transformers)" if (self.path / "tokenizer.model").exists() else ""
            raise CheckpointError(f"{self.path}: has no tokenizer.json{hint}")
        bos = self._special.get("bos_token")
        return TextAssets(
            name=self.name,
            vocab_size=self.config.vocab_size,
            tokenizer_file=file,
            chat_template=self._chat_template(),
            special_tokens=self._special,
            bos_id=None if bos is None else self._added.get(bos),  # else the tokenizer looks it up
            eos_ids=self.generation.eos_ids,
            add_bos=self._add_bos,
            room=self._room(),
        )


class FolderCheckpoint(Folder):
    """A folder with its weights, opened and checked. See `Checkpoint` for the methods' meaning."""

    kind: Literal["folder", "gguf", "dummy"] = "folder"

    def __init__(self, path: Path):
        super().__init__(path)
        self._files = open_weights(path)
        shapes = {name: file.entries[name].shape for name, file in self._files.items()}
        self._names = check_tensors(str(path), self.config, shapes)
        for name in self._names:
            self._files[name].dtype(name)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name].shape

    def load(self, name: str, dtype: DType | None = None) -> Array:
        return self._files[name].load(name, dtype)


def open_dummy(path: Path) -> DummyCheckpoint:
    """Random weights for the configuration in `path`, a folder or a config.json."""
    folder = Folder(path if path.is_dir() else path.parent)
    if (folder.path / "tokenizer.json").exists():
        assets = replace(folder.text(), room=None)  # there are no weights that the tokenizer could be in proportion to
    else:
        assets = TextAssets(folder.name, folder.config.vocab_size)
    return DummyCheckpoint(folder.config, assets, path, folder.name, folder.generation)
