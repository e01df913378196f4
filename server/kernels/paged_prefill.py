"""Causal variable-length attention over the paged cache: prefill, chunked prefill, decode and any mix in one launch.

Grid (K, query tiles). A tile holds BLOCK_M rows, which are BLOCK_M // G queries of one sequence times the G = H / K
query heads that share a key/value head, so that each key and value is read once for all of them. The number of tiles
depends on the numbers of tokens and sequences only (each sequence wastes at most one tile), and a program finds its
sequence by bisecting `query_start_loc` on the device: the grid suits a captured graph. Tiles are taken from the last
to the first, because under a causal mask the last have most to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.kernels.attention_config import PrefillConfig, padded_head_dim, prefill_config
from server.kernels.launch import INTERPRETED, Prebound, cached
from server.kernels.paged_decode import LOG2_E
from server.kernels.paged_tiles import attend_tile, load_tile, multiply_add, weigh


@triton.jit(do_not_specialize=["v_offset16", "block_table_stride", "q_stride8", "out_stride8", "first_seq", "num_seqs"])
def _prefill_kernel(
    q_ptr,
    kv_ptr,
    block_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    scale_log2,
    v_offset16: tl.int64,
    block_table_stride,
    q_stride8,
    out_stride8,
    first_seq,
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Sequence s of those from `first_seq` on owns the tiles from (rows of theirs before it) // BLOCK_Q + (sequences of
    # theirs before it) on; the last such s is ours.
    first_row = tl.load(query_start_loc_ptr + first_seq)
    low = first_seq
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if (tl.load(query_start_loc_ptr + middle) - first_row) // BLOCK_Q + middle - first_seq <= tile:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    first_query = (tile - ((query_start - first_row) // BLOCK_Q + seq - first_seq)) * BLOCK_Q
    if first_query >= query_len:
        return
    context = tl.load(seq_lens_ptr + seq) - query_len
    last_query = tl.minimum(first_query + BLOCK_Q, query_len)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    d_mask = offs_d < HEAD_DIM
    queries = first_query + offs_m // GROUP
    heads = kv_head * GROUP + offs_m % GROUP
    io_mask = ((queries < last_query) & (offs_m < BLOCK_Q * GROUP))[:, None] & d_mask[None, :]
    rows = (query_start + queries).to(tl.int64)
    q_pointers = q_ptr + (rows * q_stride8 * 8 + heads * HEAD_DIM)[:, None] + offs_d[None, :]
    q = tl.load(q_pointers, mask=io_mask, other=0.0)

    k_base = kv_ptr + kv_head * HEAD_STRIDE
    v_base = k_base + v_offset16 * 16
    table = block_table_ptr + tl.cast(seq, tl.int64) * block_table_stride
    positions = context + queries
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    end = context + last_query
    full_end = (context + first_query + 1) // BLOCK_N * BLOCK_N
    if BLOCK_N <= PAGE:
        # A tile lies in one page, whose number is read a tile ahead: the reads of keys and values wait for it.
        offs_n = tl.arange(0, BLOCK_N)
        offsets = offs_n[:, None] * ROW_STRIDE + offs_d[None, :]
        last_page = (end - 1) // PAGE
        page = tl.load(table)
        for first in tl.range(0, full_end, BLOCK_N):
            at = page.to(tl.int64) * PAGE_STRIDE + (first % PAGE) * ROW_STRIDE
            k = load_tile(k_base + at + offsets, offs_n, end, d_mask, BLOCK_D != HEAD_DIM, False)
            v = load_tile(v_base + at + offsets, offs_n, end, d_mask, BLOCK_D != HEAD_DIM, False)
            page = tl.load(table + tl.minimum((first + BLOCK_N) // PAGE, last_page))
            weights, rescale, row_max, row_sum = weigh(
                q, k, offs_n, positions, row_max, row_sum, scale_log2, BLOCK_M, BLOCK_N, False, UPCAST
            )
            acc = multiply_add(weights.to(v.dtype), v, acc * rescale[:, None], UPCAST)
    else:
        for first in tl.range(0, full_end, BLOCK_N):
            acc, row_max, row_sum = attend_tile(
                q, k_base, v_base, table, first, end, positions, offs_d, d_mask,
                acc, row_max, row_sum, scale_log2,
                BLOCK_M, BLOCK_N, PAGE_STRIDE, ROW_STRIDE, PAGE, BLOCK_D != HEAD_DIM, False, UPCAST,
            )  # fmt: skip
    for first in tl.range(full_end, end, BLOCK_N, num_stages=1):
        acc, row_max, row_sum = attend_tile(
            q, k_base, v_base, table, first, end, positions, offs_d, d_mask,
            acc, row_max, row_sum, scale_log2,
            BLOCK_M, BLOCK_N, PAGE_STRIDE, ROW_STRIDE, PAGE, BLOCK_D != HEAD_DIM, True, UPCAST,
        )  # fmt: skip
    out_pointers = out_ptr + (rows * out_stride8 * 8 + heads * HEAD_DIM)[:, None] + offs_d[None, :]
    tl.store(out_pointers, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask=io_mask)


@cached
def _bound(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page: int,
    cache_strides: tuple[int, ...],
    config: PrefillConfig,
) -> tuple[Prebound, int]:
    group = num_heads // num_kv_heads
    # A group larger than the tile of a short query (16 rows) needs a tile that holds at least one query.
    block_m = max(config.block_m, triton.next_power_of_2(group))
    constants = (
        num_kv_heads, group, head_dim, page, *cache_strides, block_m // group, block_m,
        padded_head_dim(head_dim), config.block_n, INTERPRETED,
    )  # fmt: skip
    kernel = Prebound(
        _prefill_kernel,
        constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
    )
    return kernel, block_m // group


def paged_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    num_tokens: int,
    scale: float,
    output: torch.Tensor,
    *,
    first_seq: int = 0,
    config: PrefillConfig | None = None,
) -> None:
    """Attend the last tokens of each sequence causally; query and output (T, H, D), cache (2, N, P, K, D).

    Writes the rows that `query_start_loc` covers from sequence `first_seq` on and no other; `num_tokens` bounds them.
    The sequences before, of one token each, are left to `paged_decode`.
    """
    num_seqs = seq_lens.shape[0]
    num_heads, head_dim = query.shape[1], query.shape[2]
    page, num_kv_heads = kv_cache.shape[2], kv_cache.shape[3]
    if config is None:
        rows = max_query_len * (num_heads // num_kv_heads)
        config = prefill_config(padded_head_dim(head_dim), query.element_size(), rows, page)
    kernel, block_q = _bound(query.dtype, num_heads, num_kv_heads, head_dim, page, kv_cache.stride()[1:4], config)
    kernel(
        (num_kv_heads, (num_tokens - first_seq) // block_q + num_seqs - first_seq, 1),
        (query, kv_cache, block_table, query_start_loc, seq_lens, output),
        (
            scale * LOG2_E,
            kv_cache.stride(0) // 16,
            block_table.stride(0),
            query.stride(0) // 8,
            output.stride(0) // 8,
            first_seq,
            num_seqs,
        ),
    )
