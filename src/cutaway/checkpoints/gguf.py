"""`GGUFCheckpoint`: llama.cpp's single-file models, dequantized tensor by tensor under Hugging Face's names and layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cutaway.checkpoints import gguf_config
from cutaway.checkpoints.checkpoint import NUMPY_DTYPE, Array, DType, GenerationDefaults, row_slices, store
from cutaway.checkpoints.disk import read_into
from cutaway.checkpoints.gguf_header import NOT_WEIGHTS, GGUFHeader, TensorInfo
from cutaway.checkpoints.layout import check_tensors
from cutaway.core.errors import CheckpointError
from cutaway.core.text_assets import TextAssets

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN: dict[str, DType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_CHUNK = 1 << 12  # weights a row handed to the dequantizer, which works through 16 rows at a time


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown name is answered as it is, and fails the layout check."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name


def half_split_rows(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Row i of a GGUF llama q or k belongs at row answer[i] in half-split order.

    llama.cpp's converter stores each head with the two members of a rotary pair side by side (2j, 2j+1); Hugging Face has
    them half a head apart (j, j + head_dim/2).
    """
    rows = np.arange(heads * head_dim)
    head, within = np.divmod(rows, head_dim)
    return head * head_dim + within % 2 * (head_dim // 2) + within // 2


class GGUFCheckpoint:
    """One .gguf file, opened and checked. See `Checkpoint` for the methods' meaning."""

    kind: Literal["folder", "gguf", "dummy"] = "gguf"

    def __init__(self, path: Path):
        self.path = path
        self._header = GGUFHeader(path)
        infos = dict(self._header.tensors)
        infos.pop("rope_freqs.weight", None)
        self._tensors: dict[str, TensorInfo] = {hf_name(name): info for name, info in infos.items()}
        if len(self._tensors) != len(infos):
            raise CheckpointError(f"{path}: has a tensor under two names")
        self.config = gguf_config.model_config(self._header, self._tensors, self._rope_factors())
        self._names = check_tensors(str(path), self.config, {name: info.shape for name, info in self._tensors.items()})
        for name in self._names:
            if self._tensors[name].type_name in NOT_WEIGHTS:
                raise _unknown_type(path, self._tensors[name])
        self.name = path.stem
        self.generation: GenerationDefaults = gguf_config.generation_defaults(self._header)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def text(self) -> TextAssets:
        return gguf_config.text_assets(self._header, self.name, self.config.vocab_size, self.generation)

    def load(self, name: str, dtype: DType | None = None) -> Array:
        """See `Checkpoint.load`. Rows of q and k of the llama architecture come out in half-split order."""
        info = self._tensors[name]
        stored = _PLAIN.get(info.type_name)
        target = dtype or stored or "f32"
        out = np.empty(info.shape, NUMPY_DTYPE[target])
        order = self._row_order(name)
        if stored == target and order is None:
            self._read(info, 0, out.reshape(-1).view(np.uint8))
            return Array(out, target)
        columns = info.shape[-1]
        rows = out.reshape(-1, columns)
        row_bytes = info.nbytes // rows.shape[0]
        convert = self._dequantizer(info)
        for part in row_slices(rows.shape[0], columns):
            raw = np.empty((part.stop - part.start) * row_bytes, np.uint8)
            self._read(info, part.start * row_bytes, raw)
            values = convert(raw).reshape(-1, columns)
            if order is None:
                store(values, rows[part], target)
            else:
                packed = np.empty(values.shape, NUMPY_DTYPE[target])
                store(values, packed, target)
                if len(info.shape) == 1:  # a bias: its elements are the rows
                    out[order] = packed[0]
                else:
                    rows[order[part]] = packed
        return Array(out, target)

    def _row_order(self, name: str) -> NDArray[np.intp] | None:
        if not gguf_config.is_permuted(self._header):
            return None
        if ".q_proj." in name:
            return half_split_rows(self.config.num_heads, self.config.head_dim)
        if ".k_proj." in name:
            return half_split_rows(self.config.num_kv_heads, self.config.head_dim)
        return None

    def _read(self, info: TensorInfo, offset: int, into: NDArray[np.uint8]) -> None:
        read_into(self._header.file, self.path, into, info.offset + offset, f"tensor {info.name!r}")

    def _dequantizer(self, info: TensorInfo) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
        """bytes of whole blocks -> float32 values, by the gguf package; an error if it does not know the type."""
        if info.type_name == "F32":
            return lambda raw: raw.view(np.float32)
        if info.type_name == "F16":
            return lambda raw: raw.view(np.float16).astype(np.float32)
        return _quantized(self.path, info)

    def _rope_factors(self) -> tuple[float, ...]:
        info = self._header.tensors.get("rope_freqs.weight")
        if info is None:
            return ()
        if info.type_name != "F32" or len(info.shape) != 1 or info.nbytes > 1 << 16:
            raise CheckpointError(
                f"{self.path}: tensor 'rope_freqs.weight' is {info.type_name} {list(info.shape)}, not a short F32 row"
            )
        raw = np.empty(info.nbytes, np.uint8)
        self._read(info, 0, raw)
        return tuple(raw.view(np.float32).tolist())


def _unknown_type(path: Path, info: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {info.name!r} has ggml type {info.type} ({info.type_name}), which cannot be dequantized"
    )


def _quantized(path: Path, info: TensorInfo) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    import gguf  # only a loader needs it: the front reads headers alone and starts faster without
    from gguf import quants

    try:
        kind = gguf.GGMLQuantizationType(info.type)  # ValueError: this version of the package is older than the type
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        quants.dequantize(np.zeros((1, nbytes), np.uint8), kind)
    except (NotImplementedError, ValueError, KeyError) as error:
        raise _unknown_type(path, info) from error

    def convert(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        # the library's cost is per group of 16 rows: hand it long rows, whatever the tensor's own are
        blocks = raw.size // nbytes
        row = min(blocks, _CHUNK // block)
        whole = blocks // row * row
        with np.errstate(all="ignore"):  # scales of a damaged file may overflow; NaN and infinity are the caller's to judge
            values = quants.dequantize(raw[: whole * nbytes].reshape(-1, row * nbytes), kind).reshape(-1)
            if whole < blocks:
                rest = quants.dequantize(raw[whole * nbytes :].reshape(1, -1), kind).reshape(-1)
                values = np.concatenate([values, rest])
        return values

    return convert
