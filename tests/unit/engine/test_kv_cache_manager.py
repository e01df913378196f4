from __future__ import annotations

import pytest

from server.engine.kv_cache_manager import KVCacheManager, hash_blocks
from server.engine.request import Request
from server.ipc.api_to_engine import AddRequest
from server.sampling_params import SamplingParams


def make(tokens: list[int], **sampling: int) -> Request:
    return Request(AddRequest("r", 0, tokens, SamplingParams(max_tokens=8, **sampling), 0), 0)


def computed(kv: KVCacheManager, request: Request, count: int | None = None) -> Request:
    """Admit a request and say that its tokens are computed."""
    count = len(request.token_ids) if count is None else count
    prefix = kv.find_prefix(request)
    kv.admit(request, prefix, count)
    request.num_computed = count
    kv.cache_blocks(request)
    return request


def test_hashes_are_chained() -> None:
    first, second = hash_blocks(b"", [1, 2, 1, 2, 9], 2)
    assert first != second, "equal tokens behind another prefix"
    assert hash_blocks(first, [1, 2], 2) == [second]
    assert hash_blocks(b"", [1, 2, 3, 4], 2)[0] == first
    assert hash_blocks(b"", [2, 1], 2) != [first]
    assert hash_blocks(b"", [1], 2) == []


def test_finds_the_longest_known_prefix_and_leaves_a_token() -> None:
    kv = KVCacheManager(8, 2, True)
    first = computed(kv, make([1, 2, 3, 4, 5]))
    assert kv.find_prefix(make([1, 2, 3, 4, 9])) == first.block_ids[:2]
    assert kv.find_prefix(make([1, 2, 3, 4])) == first.block_ids[:1], "its last token has to be computed"
    assert kv.find_prefix(make([1, 2, 9, 4, 5])) == first.block_ids[:1]
    assert kv.find_prefix(make([3, 4, 5])) == [], "a block's content depends on what is before it"
    assert kv.find_prefix(make([1])) == []


def test_only_blocks_full_of_known_computed_tokens_are_found() -> None:
    kv = KVCacheManager(8, 2, True)
    request = computed(kv, make([1, 2, 3, 4, 5, 6]), count=3)
    assert kv.find_prefix(make([1, 2, 3, 4, 5])) == request.block_ids[:1]
    kv.grow(request, 8)
    request.num_computed = 8
    request.num_tokens, request.in_flight = 8, 2
    kv.cache_blocks(request)
    assert kv.find_prefix(make([1, 2, 3, 4, 5, 6, 7, 8, 9])) == request.block_ids[:3]
    request.token_ids += [7, 8]
    kv.cache_blocks(request)
    assert kv.find_prefix(make([1, 2, 3, 4, 5, 6, 7, 8, 9])) == request.block_ids


def test_prefixes_outlive_their_request() -> None:
    kv = KVCacheManager(4, 2, True)
    request = computed(kv, make([1, 2, 3, 4, 5]))
    blocks = list(request.block_ids)
    kv.free(request)
    assert kv.pool.num_free == 4
    again = make([1, 2, 3, 4, 6])
    kv.admit(again, kv.find_prefix(again), 5)
    assert again.block_ids[:2] == blocks[:2]
    assert again.capacity == 6
    assert kv.pool.num_free == 1


def test_room_counts_cached_blocks_that_are_free_as_taken() -> None:
    kv = KVCacheManager(4, 2, True)
    request = computed(kv, make([1, 2, 3, 4, 5]))
    prefix = kv.find_prefix(make([1, 2, 3, 4, 5, 6]))
    assert kv.room_after(prefix, 6) == 0, "two are shared, the last free one is taken"
    kv.free(request)
    assert kv.room_after(prefix, 6) == 1
    assert kv.room_after([], 10) == -1


def test_grow_allocates_what_lacks() -> None:
    kv = KVCacheManager(4, 2, True)
    request = make([1, 2, 3])
    kv.admit(request, [], 3)
    assert (len(request.block_ids), request.capacity) == (2, 4)
    assert kv.grow(request, 4) == []
    assert kv.grow(request, 5) == request.block_ids[2:]
    with pytest.raises(ValueError, match="2 blocks wanted"):
        kv.grow(request, 10)


@pytest.mark.parametrize("wanted", ["off", "prompt_logprobs"])
def test_who_does_not_look_up(wanted: str) -> None:
    kv = KVCacheManager(8, 2, wanted != "off")
    computed(kv, make([1, 2, 3, 4, 5]))
    sampling = {"prompt_logprobs": 0} if wanted == "prompt_logprobs" else {}
    assert kv.find_prefix(make([1, 2, 3, 4, 5], **sampling)) == []


def test_lookups_are_counted() -> None:
    kv = KVCacheManager(8, 2, True)
    request = make([1, 2, 3, 4, 5])
    kv.count_lookup(request, [0, 1])
    assert (kv.num_queries, kv.num_hits) == (5, 4)
    off = KVCacheManager(8, 2, False)
    off.count_lookup(request, [])
    assert (off.num_queries, off.num_hits) == (0, 0)
