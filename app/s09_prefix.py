"""Stage 09: copy-on-write and prefix caching. Who holds which block, and which blocks are worth keeping.

A block table is a list of ids, so two tables may name the same block. Two things follow. A second holder costs nothing until
one of them writes; then that one gets a copy. And a block whose keys and values are computed can serve every later request that
begins with the same tokens: it is *published* under a hash of those tokens, and kept after its last holder has gone.

Every block is in one of three states, and this file alone moves it between them:

    free      in the allocator; holds nothing of worth
    used      held by one request or more; the number of references says by how many
    cached    published, held by nobody; stays until its memory is wanted

free + cached + used = pool. `num_free` says what could be had, so it counts the free *and* the cached ones:
num_free + num_used = pool, and num_cached is a part of num_free.

    allocate: free -> used, evicting cached blocks where the free ones do not suffice
    lookup:   cached or used -> used, one reference more
    release:  one reference less; at none, used -> cached if published, else used -> free

Your file replaces the engine's own. It is handed an allocator, which is stage 06's or any other with
`num_free`, `allocate(n) -> list[int]` (all or nothing; raises its own OutOfBlocks) and `free(ids)`; it makes none itself and
imports none. It may import the standard library and NumPy. Digests are opaque to `PrefixCache`: any bytes.

Traps by name:
  - *the lonely hash*    the keys of a paragraph depend on all that stands before it. Hashed by its own tokens alone it is found
                         behind another beginning, and the answer is fluent and about something else.
  - *the ghost*          a block is evicted, and its digest still leads to it: the next lookup reads somebody else's tokens.
  - *the empty promise*  num_free without the cached blocks: a full cache looks like a full pool, and nobody is admitted.
  - *the borrowed book*  lookup answers a block and takes no reference, and the next allocate evicts it.
  - *the wrong end*      newest first instead of oldest first: the cache then keeps what nobody asks for.
  - *given up too early* a copy needs a block. If there is none, the caller must still hold the shared one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def chain(tokens: Sequence[int], block_size: int, namespace: bytes = b"") -> list[bytes]:
    """One hash for each *full* block of `tokens`, each made from the hash before it (its parent) and the block's own tokens.
    The parent of the first block is `namespace`. A partial block at the end has none.

    tokens   ids from 0 to 2**31 - 1
    answers  list of bytes, `len(tokens) // block_size` long; each hash of 16 bytes or more

    The engine calls this in two processes, and piece by piece: the front hashes a prompt, and as the answer grows the engine
    continues with `namespace` = the last hash so far. So
      - `chain(tokens[2 * size:], size, whole[1]) == whole[2:]`, where `whole = chain(tokens, size)`;
      - Python's `hash` will not do: it is 8 bytes, and for bytes another in each process.
    It must be a cryptographic hash (hashlib): whoever could make two beginnings collide would read another user's context.
    Tokens need a fixed width, or a separator: the tokens 1, 23 and 12, 3 are different.

    >>> a, b = chain([1, 2, 9, 9], 2), chain([1, 3, 9, 9], 2)
    >>> len(a), a[1] == b[1], chain([9, 9, 5], 2, a[0]) == a[1:]
    (2, False, True)
    """
    raise NotImplementedError


class PrefixCache:
    """The only owner of references to blocks. The scheduler (stage 10) speaks to this class and to nothing below it.

    allocator   gives and takes block ids, see above; all of them are free when it is handed over
    publish     False: `publish` changes nothing and answers its block, so nothing is ever found. All else is the same.

    >>> cache = PrefixCache(BlockAllocator(9))              # 8 blocks: 1 to 8
    >>> table = cache.allocate(2); table, cache.num_used
    ([1, 2], 2)
    >>> cache.publish(1, b"digest of the first block")
    1
    >>> cache.release([2, 1]); cache.num_free, cache.num_cached, cache.num_used
    (8, 1, 0)
    >>> cache.lookup([b"digest of the first block", b"never seen"])
    [1]

    `release`, `fork`, `publish` (with publish=False, too) and `prepare_write` raise ValueError that names the block where
    nobody holds it, be it free or cached. What became of the other ids of such a call is then up to you, as in stage 06's
    `free`: no block is lost, and none is counted twice.
    """

    def __init__(self, allocator: Any, publish: bool = True):
        raise NotImplementedError

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give now: the allocator's and the cached ones. Asked several times a step: keep it
        cheap."""
        raise NotImplementedError

    @property
    def num_cached(self) -> int:
        """Published blocks that nobody holds."""
        raise NotImplementedError

    @property
    def num_used(self) -> int:
        """Blocks with a holder; one that nine requests hold counts once."""
        raise NotImplementedError

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that stand for hashes[0], hashes[1], ... up to the first that is not known; the caller then holds each of
        them once more. Blocks may be cached, or held by others at this moment. [] where the first is unknown.
        """
        raise NotImplementedError

    def allocate(self, n: int) -> list[int]:
        """`n` blocks, each held once, published under nothing. 0 gives [].

        The allocator's free blocks go first. What they lack comes from cached blocks, the least recently used first: a block
        was last used when its last holder released it. An evicted block is forgotten (its digest is a miss from now on),
        goes back to the allocator, and is then allocated from there.

        Where `n` is more than num_free, the allocator's OutOfBlocks reaches the caller, and nothing has changed: no block
        was evicted. It runs every step: keep cached blocks in the order of their use, and do not search for the oldest. (The
        checks time an eviction among 64 cached blocks and among 8,192.)
        """
        raise NotImplementedError

    def publish(self, block: int, digest: bytes) -> int:
        """The caller says that `block`, which it holds, is full and computed, and that its content has this digest. Answers the
        block that stands for the digest from now on:

          - the digest is new: `block` itself;
          - `block` stands for it already: `block`; nothing changes;
          - another block stands for it: two requests computed the same at the same time. The caller's reference moves from its
            block to the standing one (which may be cached), and the standing one is the answer. The caller writes it into its
            table, and the duplicate goes the way of every released block.

        Raises ValueError where `block` stands for another digest.
        """
        raise NotImplementedError

    def fork(self, ids: Iterable[int]) -> None:
        """One more reference to each of these blocks. Takes no block."""
        raise NotImplementedError

    def release(self, ids: Iterable[int]) -> None:
        """One reference less to each; an id may occur twice. At none, a published block is cached, as the most recently used,
        and any other is free. Callers give a table's last block first, so that it is evicted before those that it follows:
        take them in the order given. `ids` may be an iterator.
        """
        raise NotImplementedError

    def prepare_write(self, block: int) -> tuple[int, int | None]:
        """For a holder about to write into `block`: (block to write into, block to copy from first, or None).

          - others hold it, too: a fresh block, held once, takes its place; the caller's reference to `block` ends, and the
            others keep it as it is, published if it was: (fresh, block). OutOfBlocks where there is none to be had; the caller
            then still holds `block`.
          - the caller is alone: (block, None). If it was published, it is no longer: its digest will be false.

        You copy nothing: the engine does, on the device.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Asserts what must hold between calls, in your own terms: free + cached + used is what the allocator had at first, no
        block is cached and held, each digest leads to one block and back. The engine calls it after every step when
        CUTAWAY_DEBUG=1, and so do the checks; an AssertionError that says what is wrong is the best debugger of this stage.
        Of the three the checks can break only the first from outside: they take a block from the allocator behind the
        cache's back, and your `check` has to notice. The other two are for you.
        """
        raise NotImplementedError
