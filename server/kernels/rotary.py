"""Rotary embedding of q and k in place, with the optional q/k norm before it and the KV-cache write after it.

One launch does what would be up to six in eager mode. A program takes one token's key/value head and the query heads
that share it. Rounds where `server.layers.norm.RMSNorm` and `server.layers.rotary.RotaryEmbedding` round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.kernels.launch import Prebound, cached, next_power_of_2, start_dependents, wait_for_earlier


@triton.jit(do_not_specialize=["v_offset16"])
def _rotary_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    kv_ptr,
    slot_mapping_ptr,
    eps,
    v_offset16: tl.int64,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NORM: tl.constexpr,
    WRITE_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    row = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    offs_h = tl.arange(0, BLOCK_H)
    offs = tl.arange(0, BLOCK_HALF)
    half_mask = offs < HALF
    # Rows 0 .. G - 1 are query heads, row G is the key head.
    is_key = offs_h == GROUP
    heads = tl.where(is_key, NUM_HEADS + kv_head, kv_head * GROUP + offs_h)
    mask = (offs_h <= GROUP)[:, None] & half_mask[None, :]
    pointers = row + heads[:, None] * HEAD_DIM + offs[None, :]
    # What weights and the step's inputs lead to comes before the wait.
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM + offs
    cos = tl.load(angles, mask=half_mask, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=half_mask, other=0.0)[None, :]
    if WRITE_KV:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if NORM:
        q_first = tl.load(q_weight_ptr + offs, mask=half_mask, other=0.0)
        q_second = tl.load(q_weight_ptr + HALF + offs, mask=half_mask, other=0.0)
        k_first = tl.load(k_weight_ptr + offs, mask=half_mask, other=0.0)
        k_second = tl.load(k_weight_ptr + HALF + offs, mask=half_mask, other=0.0)
    wait_for_earlier(PDL)
    first = tl.load(pointers, mask=mask, other=0.0)
    second = tl.load(pointers + HALF, mask=mask, other=0.0)
    if NORM:
        wide_first = first.to(tl.float32)
        wide_second = second.to(tl.float32)
        squares = tl.sum(wide_first * wide_first, 1) + tl.sum(wide_second * wide_second, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight_first = tl.where(is_key[:, None], k_first[None, :], q_first[None, :]).to(tl.float32)
        weight_second = tl.where(is_key[:, None], k_second[None, :], q_second[None, :]).to(tl.float32)
        first = ((wide_first * factor).to(first.dtype).to(tl.float32) * weight_first).to(first.dtype)
        second = ((wide_second * factor).to(second.dtype).to(tl.float32) * weight_second).to(second.dtype)
    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    new_first = (wide_first * cos - wide_second * sin).to(first.dtype)
    new_second = (wide_second * cos + wide_first * sin).to(first.dtype)
    if WRITE_KV:
        query_mask = mask & (offs_h < GROUP)[:, None]
        tl.store(pointers, new_first, mask=query_mask)
        tl.store(pointers + HALF, new_second, mask=query_mask)
        if slot >= 0:
            key_mask = mask & is_key[:, None]
            cell = kv_ptr + slot // PAGE * PAGE_STRIDE + slot % PAGE * ROW_STRIDE + kv_head * HEAD_STRIDE
            cell_rows = cell + tl.zeros((BLOCK_H, 1), dtype=tl.int32) + offs[None, :]
            tl.store(cell_rows, new_first, mask=key_mask)
            tl.store(cell_rows + HALF, new_second, mask=key_mask)
            value = row + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + offs
            v_cell = cell + v_offset16 * 16 + offs
            tl.store(v_cell, tl.load(value, mask=half_mask), mask=half_mask)
            tl.store(v_cell + HALF, tl.load(value + HALF, mask=half_mask), mask=half_mask)
    else:
        tl.store(pointers, new_first, mask=mask)
        tl.store(pointers + HALF, new_second, mask=mask)


@cached
def _bound(
    dtype: torch.dtype,
    position_dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page: int,
    cache_strides: tuple[int, ...],
    norm: bool,
    write_kv: bool,
) -> Prebound:
    block_h = next_power_of_2(num_heads // num_kv_heads + 1)
    block_half = next_power_of_2(head_dim // 2)
    constants = (num_heads, num_kv_heads, head_dim, page, *cache_strides, block_h, block_half, norm, write_kv)
    return Prebound(_rotary_kernel, constants, num_warps=1 if block_h * block_half <= 256 else 4, pdl=True)


def rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    kv_cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> None:
    """Rotate q and k of the merged projection `qkv` (T, (H + 2K) * D), contiguous, in place. A view of its front rows
    (T, ...) does as well: only the number of rows and the address count.

    `positions` (T,), `cos_sin` float32 (max_positions, D) as `RotaryEmbedding` keeps it, `norm_weights` the weights
    (D,) of the q and k norm. With `kv_cache` and `slot_mapping`, the rotated key and the value go to the cache, and
    the key in `qkv` stays as it was.
    """
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    norm, write = norm_weights is not None, kv_cache is not None and slot_mapping is not None
    q_weight, k_weight = norm_weights if norm_weights is not None else (qkv, qkv)
    if kv_cache is None or slot_mapping is None:
        cache, slots, v_offset16, page = qkv, positions, 0, 1
        strides: tuple[int, ...] = (0, 0, 0)
    else:
        cache, slots, v_offset16, page = kv_cache, slot_mapping, kv_cache.stride(0) // 16, kv_cache.shape[2]
        strides = kv_cache.stride()[1:4]
    kernel = _bound(qkv.dtype, positions.dtype, num_heads, num_kv_heads, head_dim, page, strides, norm, write)
    kernel((tokens, num_kv_heads, 1), (qkv, positions, cos_sin, q_weight, k_weight, cache, slots), (eps, v_offset16))
