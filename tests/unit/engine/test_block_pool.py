from __future__ import annotations

import pytest

from server.engine.block_pool import BlockPool


def test_hands_out_every_block_once() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    assert sorted(blocks) == [0, 1, 2, 3]
    assert (pool.num_free, pool.usage) == (0, 1.0)
    with pytest.raises(ValueError, match="1 blocks wanted, 0 are free"):
        pool.allocate(1)
    pool.release(blocks)
    assert (pool.num_free, pool.usage) == (4, 0.0)


def test_a_pool_has_a_block() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


def test_refusing_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks wanted"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_shared_blocks_are_free_when_the_last_lets_go() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.touch(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 2
    assert pool.references[blocks[0]] == 1
    pool.release(blocks[:1])
    assert pool.num_free == 3


def test_evicts_least_recently_used_and_tails_first() -> None:
    pool = BlockPool(3)
    old, new = pool.allocate(2), pool.allocate(1)
    for digest, block in zip([b"old head", b"old tail", b"new"], [*old, *new], strict=True):
        pool.cache(block, digest)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]], "the tail of the sequence released first"
    assert pool.find(b"old tail") is None
    assert pool.find(b"old head") == old[0]
    pool.touch([old[0]])
    assert pool.allocate(1) == new, "a block in use is not evicted"
    assert pool.find(b"new") is None


def test_the_first_block_with_a_content_is_the_one_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, b"same")
    pool.cache(second, b"same")
    assert pool.find(b"same") == first
    pool.release([second])
    assert pool.allocate(1) == [second]
    assert pool.find(b"same") == first, "evicting the copy leaves the original"
