"""The KV pool: keys and values of every block and layer, in one allocation that the system backs where it is touched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from cutaway.checkpoints.config import ModelConfig
from cutaway.core.errors import CutawayError
from cutaway.core.plan import Blocks, KVSpec

SHARE = 0.25  # of the free memory, at most, when nothing else is asked
WINDOWS = 16  # full windows, at most, when nothing else is asked


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


def choose_blocks(asked: int | None, block_bytes: int, block_size: int, window: int) -> int:
    """Blocks of the pool, dummy included: `asked`, or min(25% of free memory, 16 windows). The engine's window is what they
    hold, where that is less than the model's.

    Raises CutawayError, in one line that names the option, where that cannot be had.
    """
    free = psutil.virtual_memory().available
    if asked is None:
        blocks = min(int(free * SHARE) // block_bytes, WINDOWS * -(-window // block_size) + 1)
        if blocks < 2:
            raise CutawayError(
                f"{free / 2**20:.0f} MiB of memory are free, and a quarter of that holds no KV block of "
                f"{block_bytes / 2**20:.1f} MiB: free some memory, or give --kv-blocks to use more of it"
            )
        return blocks
    if asked < 2:
        raise CutawayError(f"--kv-blocks must be at least 2 (one is never handed out), got {asked}")
    if asked * block_bytes > free:
        raise CutawayError(
            f"--kv-blocks {asked} takes {asked * block_bytes / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free: "
            f"at most {free // block_bytes} fit"
        )
    return asked


class KVCache:
    """`keys[layer]` and `values[layer]`: views [block, kv_head, block_size, dim] of one pool. They are contiguous, but where
    `head_first` has all blocks of a head beside each other, so that consecutive blocks are one run of keys.

    Every number in the pool is finite at all times but for what a request with non-finite activations wrote, and that is
    cleared before the block serves another (`clear`): so attention hides what is past a context by a mask alone.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, *, head_first: bool = False):
        outer = (config.num_kv_heads, num_blocks) if head_first else (num_blocks, config.num_kv_heads)
        shape = (config.num_layers, 2, *outer, block_size, config.head_dim)
        self.spec = KVSpec(num_blocks, block_size, bytes_per_block(config, block_size, dtype))
        try:  # calloc: pages that are never touched cost nothing, where torch.zeros writes them all
            raw = np.zeros(shape, dtype=np.int16 if dtype.itemsize == 2 else np.int32)
        except MemoryError:
            size = num_blocks * self.spec.bytes_per_block / 2**20
            raise CutawayError(f"no memory for {num_blocks} KV blocks ({size:.0f} MiB): give a smaller --kv-blocks") from None
        pool = torch.from_numpy(raw).view(dtype)
        self.pool: Tensor = pool.transpose(2, 3) if head_first else pool
        self.keys: list[Tensor] = [layer[0] for layer in self.pool]
        self.values: list[Tensor] = [layer[1] for layer in self.pool]

    def clear(self, ids: NDArray[np.int64]) -> None:
        """Zeroes blocks."""
        self.pool.index_fill_(2, torch.from_numpy(ids), 0.0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, (source, destination) each; all sources are read before any destination is written."""
        source, destination = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        self.pool.index_copy_(2, destination, self.pool.index_select(2, source))

    def export_blocks(self, ids: Sequence[int]) -> Blocks:
        """Bytes of blocks on the host, uint8 [blocks, bytes_per_block], ordered (layer, key or value, head, token, dim)."""
        chosen = self.pool.index_select(2, self._index(ids)).movedim(2, 0).contiguous()
        return Blocks(chosen.view(torch.uint8).numpy().reshape(len(ids), self.spec.bytes_per_block))

    def import_blocks(self, ids: Sequence[int], blocks: Blocks) -> None:
        """Writes bytes that `export_blocks` of the same model, dtype and block size gave. ValueError on another shape."""
        expected = (len(ids), self.spec.bytes_per_block)
        if blocks.data.shape != expected or blocks.data.dtype != np.uint8:
            raise ValueError(f"blocks are {blocks.data.dtype} {blocks.data.shape}, this pool takes uint8 {expected}")
        data = torch.from_numpy(np.array(blocks.data)).view(self.pool.dtype)
        per_block = (len(ids), *self.pool.shape[:2], *self.pool.shape[3:])
        self.pool.index_copy_(2, self._index(ids), data.view(per_block).movedim(0, 2))

    def _index(self, ids: Sequence[int]) -> Tensor:
        for block in ids:
            if not 0 <= block < self.spec.num_blocks:
                raise ValueError(f"there is no block {block}: the pool has {self.spec.num_blocks}")
        return torch.tensor(list(ids), dtype=torch.int64)
