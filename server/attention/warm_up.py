"""Batches of random tensors that make a backend compile everything it will meet, before the server is ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from server.attention.base import AttentionMetadata, AttentionSpec

if TYPE_CHECKING:
    from server.layers.attention import Attention


@dataclass(slots=True)
class SyntheticBatch:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata


def synthetic_batch(
    spec: AttentionSpec,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    max_seq_len: int | None = None,
    seed: int = 0,
    heads_first: bool = False,
) -> SyntheticBatch:
    """One batch over a cache of its own, whose pages are handed out in a random order.

    `query_lens[b]` new tokens of a sequence that is `seq_lens[b]` long with them; everything is drawn from `seed`.
    A sequence with both lengths 0 is padding and brings one padded row. `max_seq_len` is the bound that the metadata
    states (default: the true one). With `heads_first` a page lies in memory as (K, P, D); its shape is the same.
    """
    generator = torch.Generator().manual_seed(seed)
    page, tokens = spec.block_size, sum(query_lens)
    rows = tokens + query_lens.count(0)
    blocks = [-(-length // page) for length in seq_lens]
    table = torch.zeros(len(seq_lens), max(*blocks, 1), dtype=torch.int32)
    order = torch.randperm(sum(blocks) + 1, generator=generator, dtype=torch.int32)
    slots = []
    used = 0
    for row, (count, query_len, length) in enumerate(zip(blocks, query_lens, seq_lens, strict=True)):
        table[row, :count] = order[used : used + count]
        used += count
        positions = torch.arange(length - query_len, length)
        slots.append(table[row].long()[positions // page] * page + positions % page)
    start = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    device = spec.device

    # Drawn on the device: a cache of gigabytes would take the CPU seconds.
    on_device = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=spec.dtype, device=device).normal_(generator=on_device)

    if heads_first:
        kv_cache = normal(2, sum(blocks) + 1, spec.num_kv_heads, page, spec.head_dim).transpose(2, 3)
    else:
        kv_cache = normal(2, sum(blocks) + 1, page, spec.num_kv_heads, spec.head_dim)
    return SyntheticBatch(
        query=normal(rows, spec.num_heads, spec.head_dim),
        key=normal(rows, spec.num_kv_heads, spec.head_dim),
        value=normal(rows, spec.num_kv_heads, spec.head_dim),
        output=torch.full((rows, spec.num_heads, spec.head_dim), float("nan"), dtype=spec.dtype, device=device),
        kv_cache=kv_cache,
        metadata=AttentionMetadata(
            num_tokens=tokens,
            num_seqs=len(seq_lens),
            query_start_loc=start.to(device),
            seq_lens=lengths.to(device),
            block_table=table.to(device),
            slot_mapping=torch.cat((*slots, torch.full((rows - tokens,), -1))).to(device),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens) if max_seq_len is None else max_seq_len,
            query_start_loc_cpu=start,
            seq_lens_cpu=lengths,
            num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
        ),
    )


@torch.inference_mode()
def warm_up_rotation(layer: Attention, spec: AttentionSpec) -> None:
    """Compile the kernel between projection and attention of `layer`, and so of all layers, if it has one: for one
    token, and for several, which lie a row of the merged projection apart."""
    if layer.rotate_and_store is None:
        return
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    for count in (1, 2):
        batch = synthetic_batch(spec, [count], [count])
        merged = torch.zeros(count, sum(heads), spec.head_dim, dtype=spec.dtype, device=spec.device)
        positions = torch.zeros(count, dtype=torch.int64, device=spec.device)
        query, key, value = merged.split(heads, dim=1)
        layer.rotate_and_store(query, key, value, positions, batch.kv_cache, batch.metadata.slot_mapping)


def warm_up_batches(spec: AttentionSpec, sizes: list[int], query_lens: list[int]) -> Iterator[SyntheticBatch]:
    """Small batches that reach every launch configuration: decodes of each size, queries of each length."""
    for size in sizes:
        yield synthetic_batch(spec, [1] * size, [2] * size)
    for query_len in query_lens:
        yield synthetic_batch(spec, [1, query_len], [2, query_len])
