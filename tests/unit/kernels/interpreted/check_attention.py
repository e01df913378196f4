"""Paged attention against the fp32 reference, on poisoned caches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.kernelbench import reference
from benchctl.kernelbench.attention_cases import SMALL_CHECK_LAYOUTS, Layout, check_cases, poison
from benchctl.kernelbench.case import relative_error, tolerance
from server.attention.base import AttentionMetadata
from server.attention.triton_attn import LONG_DECODE, TritonAttentionBackend
from server.attention.warm_up import SyntheticBatch, synthetic_batch
from server.kernels.attention_config import DecodeConfig, decode_splits
from server.kernels.decode_plan import num_items, plan_decode
from server.kernels.paged_decode import DecodeScratch, paged_decode

CPU = torch.device("cpu")
NAN = float("nan")


def poisoned_batch(
    layout: Layout, query_lens: list[int], seq_lens: list[int], *, heads_first: bool = False
) -> SyntheticBatch:
    batch = synthetic_batch(layout.spec(CPU, torch.float32, 8), query_lens, seq_lens, heads_first=heads_first)
    poison(batch, layout.page, NAN)
    return batch


def error_of(batch: SyntheticBatch, scale: float) -> float:
    return relative_error((batch.output,), (reference.attention(batch.query, batch.kv_cache, batch.metadata, scale),))


@pytest.mark.parametrize("layout", SMALL_CHECK_LAYOUTS, ids=str)
def test_edges_of_pages_and_tiles_in_fp32(layout: Layout) -> None:
    for case in check_cases("TRITON_ATTN", TritonAttentionBackend, CPU, torch.float32, small=True):
        if str(layout) in case.shape and "padding" in case.shape:
            instance = case.build(3)
            expected = instance.expected()
            assert relative_error(instance.run(), expected) < tolerance(torch.float32, interpreted=True), case.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    spec = Layout(4, 2, 64, 16).spec(CPU, dtype, 8)
    batch = synthetic_batch(spec, [1, 9, 1], [33, 20, 1])
    poison(batch, 16, NAN)
    TritonAttentionBackend(spec).forward(batch.query, batch.kv_cache, batch.metadata, 0.125, batch.output)
    assert error_of(batch, 0.125) < tolerance(dtype, interpreted=True)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_batch(data: st.DataObject) -> None:
    """Any mix of contexts and query lengths, any grouping of heads, any page size."""
    kv_heads = data.draw(st.integers(1, 3))
    layout = Layout(
        kv_heads * data.draw(st.integers(1, 8)),
        kv_heads,
        data.draw(st.sampled_from([8, 64, 72, 80, 128])),
        data.draw(st.sampled_from([16, 32, 64, 128])),
    )
    pairs = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4))
    query_lens, seq_lens = [q for q, _ in pairs], [q + context for q, context in pairs]
    batch = poisoned_batch(layout, query_lens, seq_lens, heads_first=data.draw(st.booleans()))
    backend = TritonAttentionBackend(layout.spec(CPU, torch.float32, 8))
    backend.forward(batch.query, batch.kv_cache, batch.metadata, 0.1, batch.output)
    assert error_of(batch, 0.1) < tolerance(torch.float32, interpreted=True)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("target_programs", [1, 8, 512])
@pytest.mark.parametrize("stated_bound", [140, 100_000])
def test_any_number_of_splits_gives_the_same(target_programs: int, stated_bound: int, planned: bool) -> None:
    layout = Layout(6, 2, 64, 16)
    lengths = [140, 1, 16, 0]
    batch = poisoned_batch(layout, [1, 1, 1, 0], lengths)
    scratch = DecodeScratch(CPU, 6, 2, 64, 512)
    meta = batch.metadata
    for _ in range(2):  # the second run finds the counters as the first left them
        batch.output.fill_(NAN)
        paged_decode(
            batch.query,
            batch.kv_cache,
            meta.block_table,
            meta.seq_lens,
            stated_bound,
            0.125,
            batch.output,
            scratch,
            config=DecodeConfig(16, 4, 1, target_programs, 16, planned),
        )
        assert error_of(batch, 0.125) < tolerance(torch.float32, interpreted=True)
        assert not scratch.counter.any()


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "bound", "taken"),
    [
        ([1, 5, 1], [90, 8, 3], LONG_DECODE, 1),
        ([1, 1, 1, 70, 2], [33, 1, 16, 75, 2], LONG_DECODE, 3),
        ([1] * 9 + [3, 17], [*range(1, 10), 40, 17], 40, 9),
        ([1] * 7 + [3], [2] * 7 + [3], 3, 0),
        ([5, 1], [8, 90], LONG_DECODE, 0),
    ],
)
def test_decodes_at_the_front_of_a_mixed_batch_go_to_split_kv(
    query_lens: list[int], seq_lens: list[int], bound: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(4, 2, 64, 16)
    batch = poisoned_batch(layout, query_lens, seq_lens)
    backend = TritonAttentionBackend(layout.spec(CPU, torch.float32, 16))
    sizes = []
    decode = backend.decode

    def noted(query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, *rest: Any) -> None:
        sizes.append(metadata.num_seqs)
        decode(query, kv_cache, metadata, *rest)

    monkeypatch.setattr(backend, "decode", noted)
    stated = replace(batch.metadata, max_seq_len=bound)
    for _ in range(2):  # two layers
        batch.output.fill_(NAN)
        backend.forward(batch.query, batch.kv_cache, stated, 0.125, batch.output)
        assert error_of(batch, 0.125) < tolerance(torch.float32, interpreted=True)
    assert sizes == [taken, taken][: 2 * bool(taken)]


def test_queries_may_be_a_slice_of_the_merged_projection() -> None:
    layout = Layout(4, 2, 64, 16)
    for query_lens in ([1, 1], [3, 7]):
        batch = poisoned_batch(layout, query_lens, [20, 40])
        merged = torch.randn(batch.query.shape[0], 8 * 64)
        batch.query = merged[:, : 4 * 64].unflatten(1, (4, 64))
        backend = TritonAttentionBackend(layout.spec(CPU, torch.float32, 8))
        backend.forward(batch.query, batch.kv_cache, batch.metadata, 0.125, batch.output)
        assert error_of(batch, 0.125) < tolerance(torch.float32, interpreted=True)


def test_keys_and_values_are_written_where_attention_reads_them() -> None:
    layout = Layout(4, 2, 64, 16)
    for heads_first in (False, True):
        batch = poisoned_batch(layout, [1, 5, 0], [20, 40, 0], heads_first=heads_first)
        backend = TritonAttentionBackend(layout.spec(CPU, torch.float32, 8))
        backend.write_kv(batch.key, batch.value, batch.kv_cache, batch.metadata.slot_mapping)
        for row, slot in enumerate(batch.metadata.slot_mapping.tolist()):
            if slot >= 0:
                assert torch.equal(batch.kv_cache[0, slot // 16, slot % 16], batch.key[row])
                assert torch.equal(batch.kv_cache[1, slot // 16, slot % 16], batch.value[row])
        backend.forward(batch.query, batch.kv_cache, batch.metadata, 0.125, batch.output)
        assert error_of(batch, 0.125) < tolerance(torch.float32, interpreted=True)


def test_splits_stay_within_the_scratch() -> None:
    for num_seqs in (1, 2, 3, 7, 64, 512):
        for kv_heads in (1, 3, 8):
            scratch = DecodeScratch(CPU, kv_heads, kv_heads, 8, 512, 1056)
            config = DecodeConfig(64, 4, 3, 1056, 64)
            splits = decode_splits(config, num_seqs, kv_heads, 1 << 20)
            assert num_seqs * kv_heads * splits * 8 <= scratch.partial.numel()
            assert num_items(config, num_seqs, kv_heads) * kv_heads * 8 <= scratch.partial.numel()


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([16, 48]),
)
def test_a_plan_covers_every_token_once(lengths: list[int], kv_heads: int, target: int, min_chunk: int) -> None:
    config = DecodeConfig(16, 4, 1, target, min_chunk, planned=True)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    items = plan_decode(seq_lens, kv_heads, 8, config)
    assert len(items) == num_items(config, len(lengths), kv_heads)
    used = [item for item in items.tolist() if item[0] >= 0]
    assert all(item[0] == -1 for item in items.tolist()[len(used) :])
    for seq, length in enumerate(lengths):
        own = [item for item in used if item[0] == seq]
        # In order and next to each other, so that a part's place tells where those of its sequence lie.
        assert [item[3] for item in own] == list(range(len(own)))
        assert [used.index(item) for item in own] == list(range(used.index(own[0]), used.index(own[0]) + len(own)))
        assert own[0][1] == 0
        assert own[-1][2] == length
        assert all(before[2] == after[1] for before, after in itertools.pairwise(own))
        assert all(item[4] == len(own) for item in own)
        assert all(item[2] > item[1] or length == 0 for item in own)
