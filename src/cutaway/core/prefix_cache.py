"""Who holds which block, and which computed blocks are worth keeping (stage 09).

A full block whose keys and values are computed is *published* under a hash of its tokens and of all tokens before it, so
that a later request with the same beginning takes it instead of computing it (vLLM's automatic prefix caching). A published
block that nobody holds stays *cached* until its memory is wanted; the least recently used goes first. Blocks are shared,
so a holder that writes into one copies it first (`prepare_write`).

Invariants: every block is free (in the allocator), cached (published, nobody holds it) or used (held at least once);
free + cached + used = pool; a digest stands for one block and a block for one digest; eviction takes the same time whatever
the size of the pool.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np


class Allocator(Protocol):
    """What is asked of `blocks.BlockAllocator`."""

    @property
    def num_free(self) -> int: ...
    def allocate(self, n: int = 1) -> list[int]: ...
    def free(self, ids: Iterable[int]) -> None: ...


def chain(tokens: Sequence[int], block_size: int, namespace: bytes = b"") -> list[bytes]:
    """One sha256 a full block, each over (its parent's hash, its tokens); the first block's parent is `namespace`.

    The parent makes equal tokens behind different beginnings differ. A namespace (tenant, adapter) keeps requests apart
    that must not share; the last hash of a chain as namespace continues that chain. sha256, because a collision would
    hand one user's context to another; a block's tokens have one length, so (parent, tokens) is read in one way only.
    """
    raw = np.asarray(tokens, dtype="<i4").tobytes()
    width = 4 * block_size
    hashes: list[bytes] = []
    parent = namespace
    for start in range(0, len(raw) - width + 1, width):
        parent = hashlib.sha256(parent + raw[start : start + width]).digest()
        hashes.append(parent)
    return hashes


class PrefixCache:
    """The only owner of references to blocks; the scheduler speaks to nothing below it.

    allocator   gives and takes block ids; must be all free now
    publish     False: nothing is published, so nothing is ever found
    """

    def __init__(self, allocator: Allocator, publish: bool = True):
        self._allocator = allocator
        self._publishing = publish
        self._pool = allocator.num_free
        self._refs: dict[int, int] = {}  # used blocks: how often each is held
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # published and not held; least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give: free ones and cached ones."""
        return self._allocator.num_free + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._refs)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached beginning of `hashes`; the caller holds each once more."""
        found: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            self._hold(block)
            found.append(block)
        return found

    def allocate(self, n: int) -> list[int]:
        """`n` blocks, each held once; cached ones are evicted as needed. Raises the allocator's OutOfBlocks, evicting none."""
        if n <= self.num_free:
            for _ in range(n - self._allocator.num_free):
                block, _ = self._cached.popitem(last=False)
                self._withdraw(block)
                self._allocator.free([block])
        ids = self._allocator.allocate(n)
        for block in ids:
            self._refs[block] = 1
        return ids

    def publish(self, block: int, digest: bytes) -> int:
        """Offers a full and computed block that the caller holds; answers the block that stands for `digest` from now on.

        Where another block stands for it already, the caller's reference moves to that one: two requests that computed
        the same beginning in the same step end with one copy.
        """
        self._need_held(block)
        if not self._publishing:
            return block
        standing = self._block_of.get(digest)
        if standing is not None:
            if standing != block:
                self._hold(standing)
                self.release([block])
            return standing
        if block in self._digest_of:
            raise ValueError(f"block {block} is published under another digest")
        self._block_of[digest] = block
        self._digest_of[block] = digest
        return block

    def fork(self, ids: Iterable[int]) -> None:
        """One more reference to each, all of which must be held."""
        for block in ids:
            self._need_held(block)
            self._refs[block] += 1

    def release(self, ids: Iterable[int]) -> None:
        """One reference less to each. Give a table's last block first: it is then evicted before those that it follows."""
        for block in ids:
            self._need_held(block)
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            del self._refs[block]
            if block in self._digest_of:
                self._cached[block] = None
            else:
                self._allocator.free([block])

    def prepare_write(self, block: int) -> tuple[int, int | None]:
        """(block to write, block to copy first or None) for a holder about to write into `block`.

        A block with other holders is left to them, and a fresh one takes its place (OutOfBlocks where there is none).
        A published one without other holders is written in place and no longer published: its digest would be false.
        """
        self._need_held(block)
        if self._refs[block] > 1:
            fresh = self.allocate(1)[0]
            self.release([block])
            return fresh, block
        if block in self._digest_of:
            self._withdraw(block)
        return block, None

    def check(self) -> None:
        """Asserts the invariants of this file."""
        free = self._allocator.num_free
        assert free + len(self._cached) + len(self._refs) == self._pool, (
            f"{free} free + {len(self._cached)} cached + {len(self._refs)} used is not the pool's {self._pool}"
        )
        assert not self._cached.keys() & self._refs.keys(), "a block is cached and held"
        assert all(n > 0 for n in self._refs.values()), "a block is kept with no holder"
        assert {b: d for d, b in self._block_of.items()} == self._digest_of, "digests and blocks differ"
        assert self._cached.keys() <= self._digest_of.keys(), "a cached block has no digest"
        assert self._digest_of.keys() <= self._cached.keys() | self._refs.keys(), "a free block is still published"

    def _hold(self, block: int) -> None:
        self._cached.pop(block, None)
        self._refs[block] = self._refs.get(block, 0) + 1

    def _withdraw(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]

    def _need_held(self, block: int) -> None:
        if block not in self._refs:
            raise ValueError(f"block {block} is not held by anyone")
