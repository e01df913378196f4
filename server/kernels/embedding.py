"""Gather embedding rows: the first kernel of a step, launched after everything before (`server.kernels.launch`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.kernels.launch import Prebound, cached

_BLOCK = 1024


@triton.jit
def _embedding_kernel(ids_ptr, weight_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    token = tl.load(ids_ptr + row).to(tl.int64)
    tl.store(out_ptr + row * SIZE + offs, tl.load(weight_ptr + token * SIZE + offs, mask=mask), mask=mask)


@cached
def _bound(dtype: torch.dtype, id_dtype: torch.dtype, size: int) -> Prebound:
    return Prebound(_embedding_kernel, (size, _BLOCK), num_warps=4)


def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """input_ids (T,) int32 or int64, weight (vocab, n) -> (T, n). Ids must be inside the vocabulary."""
    rows, size = input_ids.shape[0], weight.shape[1]
    out = torch.empty((rows, size), dtype=weight.dtype, device=weight.device)
    if rows:
        kernel = _bound(weight.dtype, input_ids.dtype, size)
        kernel((rows, -(-size // _BLOCK), 1), (input_ids, weight, out))
    return out
