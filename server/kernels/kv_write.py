"""Store a step's keys and values in the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.kernels.launch import Prebound, cached, next_power_of_2, start_dependents, wait_for_earlier


@triton.jit(do_not_specialize=["v_offset16", "key_stride8", "value_stride8"])
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    kv_ptr,
    slot_mapping_ptr,
    v_offset16: tl.int64,
    key_stride8,
    value_stride8,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    wait_for_earlier(PDL)
    if slot < 0:
        return
    offs = tl.arange(0, BLOCK)
    mask = offs < ROW
    key = tl.load(key_ptr + token * (key_stride8 * 8) + offs, mask=mask)
    value = tl.load(value_ptr + token * (value_stride8 * 8) + offs, mask=mask)
    row = kv_ptr + slot // PAGE * PAGE_STRIDE + slot % PAGE * ROW_STRIDE
    row += offs // HEAD_DIM * HEAD_STRIDE + offs % HEAD_DIM
    tl.store(row, key, mask=mask)
    tl.store(row + v_offset16 * 16, value, mask=mask)


@cached
def _bound(dtype: torch.dtype, page: int, cache_strides: tuple[int, ...], row: int, head_dim: int) -> Prebound:
    block = next_power_of_2(row)
    constants = (page, *cache_strides, row, head_dim, block)
    return Prebound(_write_kv_kernel, constants, num_warps=4 if block >= 1024 else 2, pdl=True)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store key and value (T, K, D), contiguous inside a row, at `slot_mapping` (T,); slot -1 is skipped."""
    tokens, heads, head_dim = key.shape
    if tokens == 0:
        return
    kernel = _bound(key.dtype, kv_cache.shape[2], kv_cache.stride()[1:4], heads * head_dim, head_dim)
    scalars = (kv_cache.stride(0) // 16, key.stride(0) // 8, value.stride(0) // 8)
    kernel((tokens, 1, 1), (key, value, kv_cache, slot_mapping), scalars)
