"""Split-KV attention for decode: one query token per sequence, over the paged cache.

A program attends the G = H / K query heads that share a key/value head to one chunk of one sequence's tokens. Chunks
are cut on the device from `seq_lens`, so that a captured graph serves any lengths. For few sequences the grid is
(K, B, S), every sequence is cut into up to S chunks, and a program whose chunk is empty ends at once; for many it is
(K, items of a plan) (see `server.kernels.decode_plan`). The last program of a (sequence, head) to finish merges the
partial results in split order, so that the output does not depend on scheduling (FlashDecoding's split and merge,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html, in one launch instead of two).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.kernels.attention_config import (
    DECODE_TABLE,
    MAX_SPLITS,
    DecodeConfig,
    decode_config,
    decode_splits,
    padded_head_dim,
)
from server.kernels.decode_plan import FIELDS, plan_decode
from server.kernels.launch import (
    INTERPRETED,
    Prebound,
    cached,
    next_power_of_2,
    start_dependents,
    wait_for_earlier,
)
from server.kernels.paged_tiles import attend_tile

_MERGE_ELEMENTS = 4096
"""Elements of partial results that the merge holds at a time: 32 registers a thread at 4 warps, few enough that the
merge, which one program in many runs, does not cost all of them occupancy."""


@triton.jit(do_not_specialize=["v_offset16", "block_table_stride", "q_stride8", "out_stride8"])
def _decode_kernel(
    q_ptr,
    kv_ptr,
    block_table_ptr,
    seq_lens_ptr,
    items_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    scale_log2,
    v_offset16: tl.int64,
    block_table_stride,
    q_stride8,
    out_stride8,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    FIELDS: tl.constexpr,
    PLANNED: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    kv_head = tl.program_id(0)
    if PLANNED:
        item = tl.program_id(1)
        # The plan is made within the step, so that it is read after the wait.
        wait_for_earlier(PDL)
        fields = items_ptr + item * FIELDS
        seq = tl.load(fields)
        start = tl.load(fields + 1)
        end = tl.load(fields + 2)
        split = tl.load(fields + 3)
        num_splits = tl.load(fields + 4)
        first_part = item - split
        if seq < 0:
            return
    else:
        seq = tl.program_id(1)
        split = tl.program_id(2)
        max_splits = tl.num_programs(2)
        # Lengths are inputs of the step. Every program waits, also one that has nothing to do.
        seq_len = tl.load(seq_lens_ptr + seq)
        wait_for_earlier(PDL)
        chunk = tl.cdiv(tl.cdiv(seq_len, max_splits), BLOCK_N) * BLOCK_N
        chunk = tl.maximum(chunk, MIN_CHUNK)
        start = split * chunk
        if (start >= seq_len) & (split > 0):
            return
        end = tl.minimum(start + chunk, seq_len)
        num_splits = tl.cdiv(seq_len, chunk)
        first_part = seq * max_splits

    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    d_mask = offs_d < HEAD_DIM
    io_mask = (offs_g < GROUP)[:, None] & d_mask[None, :]
    io_offsets = (kv_head * GROUP + offs_g)[:, None] * HEAD_DIM + offs_d[None, :]
    row = seq.to(tl.int64)
    q = tl.load(q_ptr + row * q_stride8 * 8 + io_offsets, mask=io_mask, other=0.0)
    out_pointers = out_ptr + row * out_stride8 * 8 + io_offsets

    k_base = kv_ptr + kv_head * HEAD_STRIDE
    v_base = k_base + v_offset16 * 16
    table = block_table_ptr + row * block_table_stride
    positions = tl.zeros((BLOCK_G,), dtype=tl.int32) + (end - 1)
    acc = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_G,), dtype=tl.float32)
    # One loop, masked throughout: the last tile, nearly always a partial one, is read ahead like the others.
    for first in tl.range(start, end, BLOCK_N):
        acc, row_max, row_sum = attend_tile(
            q, k_base, v_base, table, tl.multiple_of(first, BLOCK_N), end, positions, offs_d, d_mask,
            acc, row_max, row_sum, scale_log2,
            BLOCK_G, BLOCK_N, PAGE_STRIDE, ROW_STRIDE, PAGE, BLOCK_D != HEAD_DIM, True, UPCAST,
        )  # fmt: skip

    if num_splits <= 1:
        # An empty (padded) sequence has attended to nothing and writes zeros.
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        tl.store(out_pointers, acc.to(out_ptr.dtype.element_ty), mask=io_mask)
        return

    cell = (first_part * NUM_KV_HEADS + kv_head).to(tl.int64)
    mine = cell + split * NUM_KV_HEADS
    g_mask = offs_g < GROUP
    stat = stats_ptr + mine * (2 * GROUP) + offs_g
    tl.store(stat, row_max * scale_log2, mask=g_mask)
    tl.store(stat + GROUP, row_sum, mask=g_mask)
    part = partial_ptr + mine * (GROUP * HEAD_DIM)
    tl.store(part + offs_g[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=io_mask)
    # Every thread's stores come before the barrier, and thus before the release that announces them.
    tl.debug_barrier()
    counter = counter_ptr + seq * NUM_KV_HEADS + kv_head
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == num_splits - 1:
        tl.store(counter, 0)
        # First the weight of every split, from its few statistics; then the parts, whose reads depend on nothing.
        offs_q = tl.arange(0, BLOCK_Q)
        q_mask = offs_q < GROUP
        offs_s = tl.arange(0, MAX_SPLITS)
        STAT: tl.constexpr = NUM_KV_HEADS * 2 * GROUP
        stats = stats_ptr + cell * (2 * GROUP) + offs_q[None, :]
        mask = (offs_s < num_splits)[:, None] & q_mask[None, :]
        maxima = tl.load(stats + offs_s[:, None] * STAT, mask=mask, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(stats + offs_s[:, None] * STAT + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        # Lanes past the last head hold no maximum; keep -inf - -inf out of them.
        top = tl.where(q_mask, tl.max(maxima, 0), 0.0)
        total = tl.where(q_mask, tl.sum(sums * tl.exp2(maxima - top[None, :]), 0), 1.0)
        merged = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
        parts = partial_ptr + cell * (GROUP * HEAD_DIM)
        part_offsets = offs_q[:, None] * HEAD_DIM + offs_d[None, :]
        part_mask = q_mask[:, None] & d_mask[None, :]
        for first_split in tl.range(0, num_splits, MERGE_SPLITS):
            some = first_split + tl.arange(0, MERGE_SPLITS)
            some_mask = (some < num_splits)[:, None] & q_mask[None, :]
            peaks = tl.load(stats + some[:, None] * STAT, mask=some_mask, other=float("-inf"), cache_modifier=".cg")
            read = tl.load(
                parts + some[:, None, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM) + part_offsets[None, :, :],
                mask=some_mask[:, :, None] & part_mask[None, :, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            merged += tl.sum(read * tl.exp2(peaks - top[None, :])[:, :, None], 0)
        out_row = out_ptr + row * out_stride8 * 8 + kv_head * (GROUP * HEAD_DIM)
        tl.store(out_row + part_offsets, (merged / total[:, None]).to(out_ptr.dtype.element_ty), mask=part_mask)


_MOST_PROGRAMS = max(config.target_programs for table in DECODE_TABLE.values() for config in table.values())


class DecodeScratch:
    """Buffers for partial results, for batches of up to `max_num_seqs` sequences."""

    def __init__(
        self,
        device: torch.device,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_num_seqs: int,
        target_programs: int = _MOST_PROGRAMS,
    ) -> None:
        """`target_programs`: the largest of the configurations that will be used, by default of the table."""
        self.max_num_seqs = max_num_seqs
        # Splits are rounded up to the target, by less than one for each sequence; a plan has one for each, and more up
        # to the target.
        cells = num_kv_heads * (max_num_seqs + -(-target_programs // num_kv_heads))
        group = num_heads // num_kv_heads
        self.partial = torch.empty(cells * group * head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(cells * group * 2, dtype=torch.float32, device=device)
        self.counter = torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device)
        """How many programs of a (sequence, head) have finished; the last one sets it back to zero."""


@cached
def _bound(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page: int,
    cache_strides: tuple[int, ...],
    config: DecodeConfig,
) -> Prebound:
    group = num_heads // num_kv_heads
    block_q, block_d = next_power_of_2(group), padded_head_dim(head_dim)
    merge_splits = max(1, min(16, _MERGE_ELEMENTS // (block_q * block_d)))
    constants = (
        num_kv_heads, group, head_dim, page, *cache_strides, max(16, block_q), block_d, config.block_n,
        0 if config.planned else config.min_chunk, block_q, MAX_SPLITS, merge_splits, FIELDS, config.planned,
        INTERPRETED,
    )  # fmt: skip
    return Prebound(_decode_kernel, constants, num_warps=config.num_warps, num_stages=config.num_stages, pdl=True)


LOG2_E = 1.4426950408889634


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    output: torch.Tensor,
    scratch: DecodeScratch,
    *,
    config: DecodeConfig | None = None,
    plan: torch.Tensor | None = None,
) -> None:
    """Attend one query token per sequence; query and output (T, H, D), cache (2, N, P, K, D), contiguous inside a row.

    Row b of query and output belongs to sequence b; rows of sequences with length 0 are set to zero, rows past the
    last sequence are left alone. A `plan` that `plan_decode` made of the same batch serves all layers; without one it
    is made here if it is needed.
    """
    # A length beyond the rows belongs to no row.
    num_seqs = min(seq_lens.shape[0], query.shape[0])
    num_heads, head_dim = query.shape[1], query.shape[2]
    page, num_kv_heads = kv_cache.shape[2], kv_cache.shape[3]
    if config is None:
        config = decode_config(padded_head_dim(head_dim), query.element_size(), num_seqs)
    if not config.planned:
        grid = (num_kv_heads, num_seqs, decode_splits(config, num_seqs, num_kv_heads, max_seq_len))
    else:
        if plan is None:
            plan = plan_decode(seq_lens[:num_seqs], num_kv_heads, scratch.max_num_seqs, config)
        grid = (num_kv_heads, plan.shape[0], 1)
    kernel = _bound(query.dtype, num_heads, num_kv_heads, head_dim, page, kv_cache.stride()[1:4], config)
    kernel(
        grid,
        (
            query, kv_cache, block_table, seq_lens, seq_lens if plan is None else plan, output,
            scratch.partial, scratch.stats, scratch.counter,
        ),
        (scale * LOG2_E, kv_cache.stride(0) // 16, block_table.stride(0), query.stride(0) // 8, output.stride(0) // 8),
    )  # fmt: skip
