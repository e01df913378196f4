"""Which blocks a request holds, and which of them it may share with others."""

from __future__ import annotations

import hashlib
import sys
from array import array

from server.engine.block_pool import BlockPool
from server.engine.request import Request

_ROOT = b""


def hash_blocks(parent: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
    """SHA-256 of each full block of `token_ids` with the hash of the block before it, `parent` for the first: equal
    only for equal prefixes."""
    # One conversion for all blocks: it costs as much as the hash.
    data = array("q", token_ids).tobytes()
    size = block_size * 8
    hashes = []
    for start in range(0, len(data) - size + 1, size):
        parent = hashlib.sha256(parent + data[start : start + size]).digest()
        hashes.append(parent)
    return hashes


class KVCacheManager:
    """Block tables over a `BlockPool`, with prefix caching."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queries = 0
        """Prompt tokens looked up."""
        self.num_hits = 0
        """Prompt tokens found."""

    def blocks_needed(self, request: Request, num_tokens: int) -> int:
        """Blocks that `request` lacks to hold `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(request.block_ids))

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the longest known prefix of the request; takes no reference.

        At least one token is left out: its logits are needed for the next one. A request that wants log-probabilities
        of its prompt has to compute all of it.
        """
        if not self.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return []
        blocks = []
        count = (len(request.token_ids) - 1) // self.block_size
        for digest in self._hashes(request, count)[:count]:
            block = self.pool.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_lookup(self, request: Request, hits: list[int]) -> None:
        """Account for an admitted request's look-up."""
        if self.enable_prefix_caching:
            self.num_queries += len(request.token_ids)
            self.num_hits += len(hits) * self.block_size

    def room_after(self, prefix: list[int], num_tokens: int) -> int:
        """Blocks that stay free once a request that starts from the cached `prefix` holds `num_tokens` tokens;
        negative when it lacks that many."""
        taken = sum(1 for block in prefix if self.pool.references[block] == 0)
        return self.pool.num_free - taken - (-(-num_tokens // self.block_size) - len(prefix))

    def admit(self, request: Request, prefix: list[int], num_tokens: int) -> None:
        """Give a request without blocks the cached `prefix` and new blocks for `num_tokens` tokens in all."""
        self.pool.touch(prefix)
        request.block_ids = list(prefix)
        request.num_cached_blocks = len(prefix)
        request.cache_at = (len(prefix) + 1) * self.block_size if self.enable_prefix_caching else sys.maxsize
        self.grow(request, num_tokens)

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Give a request the blocks it lacks for `num_tokens` tokens; returns the new ones.

        Raises ValueError when the pool has not enough.
        """
        new = self.pool.allocate(self.blocks_needed(request, num_tokens))
        request.block_ids += new
        request.capacity = len(request.block_ids) * self.block_size
        return new

    def cache_blocks(self, request: Request) -> None:
        """Index the request's blocks that are full of known tokens, computed or scheduled to be.

        Called once a step is settled, for requests that have computed `cache_at` tokens: the worker runs steps in
        order, so whoever finds a block here reads it after it is written. A block with a token in flight waits until
        the token is known.
        """
        if not self.enable_prefix_caching:
            return
        full = min(request.num_computed, len(request.token_ids)) // self.block_size
        hashes = self._hashes(request, full)
        for i in range(request.num_cached_blocks, full):
            self.pool.cache(request.block_ids[i], hashes[i])
        request.num_cached_blocks = max(request.num_cached_blocks, full)
        request.cache_at = (request.num_cached_blocks + 1) * self.block_size

    def free(self, request: Request) -> None:
        """Take all its blocks from a request; what they cache stays until somebody else gets them."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.capacity = 0

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Hashes of the request's first `count` blocks, maybe of more; all their tokens must be known."""
        hashes = request.block_hashes
        done = len(hashes)
        if done < count:
            tokens = request.token_ids[done * self.block_size : count * self.block_size]
            hashes += hash_blocks(hashes[-1] if hashes else _ROOT, tokens, self.block_size)
        return hashes
