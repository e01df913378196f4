"""The pool of KV-cache blocks: reference counts, a free list in LRU order, and an index of cached blocks by hash."""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Blocks 0 to `num_blocks - 1`.

    A block is *used* while its reference count is positive, else it is in the free list, oldest first. A free block
    may still be *cached*: its content is indexed by hash until the block is handed out again, so that the free list is
    also the LRU eviction order of the prefix cache.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        # O(1) removal from the middle, and unlike a dict's from the front too: a dict walks over what was deleted.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting what they cached, least recently used first.

        Raises ValueError when there are not that many; the caller asks `num_free` before.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} are free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self.references[block] = 1
            taken.append(block)
        return taken

    def touch(self, blocks: list[int]) -> None:
        """Add a reference to cached blocks that a request shares."""
        for block in blocks:
            if self.references[block] == 0:
                del self._free[block]
            self.references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop a reference to each of a request's blocks, given in order of position.

        The last block goes to the free list first: the tail of a sequence is the least likely to be shared, and a
        prefix whose head is evicted is of no use.
        """
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free[block] = None

    def cache(self, block: int, digest: bytes) -> None:
        """Index a full block; the first block with a content stays the one that is found."""
        if digest not in self._cached:
            self._cached[digest] = block
            self._hash_of[block] = digest

    def find(self, digest: bytes) -> int | None:
        return self._cached.get(digest)

    def _forget(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            del self._cached[digest]
            self._hash_of[block] = None
