"""What the paged attention kernels share: reading tiles of the cache through a block table, and the online softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_offsets(
    block_table,
    offs_n,
    first,
    limit,
    offs_d,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Where the cache rows of positions `offs_n`, which start at `first`, lie: one element offset for all of them, and
    one for each element (BLOCK_N, BLOCK_D).

    `first` is a multiple of BLOCK_N, so that a tile that is no longer than a page lies in one page and needs one
    look-up. With MASKED, positions from `limit` on are not looked up: the table may hold anything there.
    """
    if BLOCK_N <= PAGE:
        base = tl.load(block_table + first // PAGE).to(tl.int64) * PAGE_STRIDE + (first % PAGE) * ROW_STRIDE
        rows = tl.arange(0, BLOCK_N) * ROW_STRIDE
    else:
        if MASKED:
            pages = tl.load(block_table + offs_n // PAGE, mask=offs_n < limit, other=0)
        else:
            pages = tl.load(block_table + offs_n // PAGE)
        base = tl.full((), 0, dtype=tl.int64)
        rows = pages.to(tl.int64) * PAGE_STRIDE + (offs_n % PAGE) * ROW_STRIDE
    return base, rows[:, None] + offs_d[None, :]


@triton.jit
def load_tile(pointers, offs_n, limit, d_mask, PAD_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows of the cache. What lies past `limit` or past the head size reads as zero, whatever the cache holds there:
    a NaN in an unused slot must not meet the zero probability that masks it."""
    if MASKED and PAD_D:
        return tl.load(pointers, mask=(offs_n < limit)[:, None] & d_mask[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=(offs_n < limit)[:, None], other=0.0)
    elif PAD_D:
        return tl.load(pointers, mask=d_mask[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def multiply_add(a, b, acc, UPCAST: tl.constexpr):
    """`acc + a @ b`, accumulated in fp32; fp32 operands are not rounded to tf32.

    UPCAST is for Triton's interpreter, whose dot is wrong for bf16 operands.
    """
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def weigh(
    q,
    k,
    offs_n,
    q_positions,
    row_max,
    row_sum,
    scale_log2,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The first half of a step of the online softmax: unnormalised weights (BLOCK_M, BLOCK_N) of the keys, the factor
    for what was summed before, and the new maximum (of the unscaled scores) and sum of each row."""
    scores = multiply_add(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), UPCAST)
    if MASKED:
        scores = tl.where(offs_n[None, :] <= q_positions[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # One multiply-add an element: the scale, which is positive, is applied with the subtraction.
    weights = tl.exp2(scores * scale_log2 - (new_max * scale_log2)[:, None])
    rescale = tl.exp2((row_max - new_max) * scale_log2)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def attend_tile(
    q,
    k_base,
    v_base,
    block_table,
    first,
    limit,
    q_positions,
    offs_d,
    d_mask,
    acc,
    row_max,
    row_sum,
    scale_log2,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    PAD_D: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One step of the online softmax over the keys `first .. first + BLOCK_N`.

    Without MASKED every row may see every key of the tile. With it, row r sees positions <= `q_positions[r]`, and
    only positions < `limit` are read. `row_max` is that of the unscaled scores.
    """
    offs_n = first + tl.arange(0, BLOCK_N)
    base, offsets = tile_offsets(
        block_table, offs_n, first, limit, offs_d, PAGE_STRIDE, ROW_STRIDE, BLOCK_N, PAGE, MASKED
    )
    k = load_tile(k_base + base + offsets, offs_n, limit, d_mask, PAD_D, MASKED)
    weights, rescale, row_max, row_sum = weigh(
        q, k, offs_n, q_positions, row_max, row_sum, scale_log2, BLOCK_M, BLOCK_N, MASKED, UPCAST
    )
    v = load_tile(v_base + base + offsets, offs_n, limit, d_mask, PAD_D, MASKED)
    acc = multiply_add(weights.to(v.dtype), v, acc * rescale[:, None], UPCAST)
    return acc, row_max, row_sum
