"""RMSNorm, alone and after adding the residual stream. Rounds where `server.layers.norm.RMSNorm` rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.kernels.launch import Prebound, cached, next_power_of_2, start_dependents, wait_for_earlier


@triton.jit
def normalise(x, weight, eps, SIZE: tl.constexpr):
    """RMSNorm of one row (BLOCK,) whose tail is zero; x in the model's precision, which the result keeps."""
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    # Products are taken in fp32 and rounded once, which equals a product in bf16; the interpreter has no bf16.
    return (wide.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    eps,
    X_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < SIZE
    source = x_ptr + row // HEADS * X_STRIDE + row % HEADS * SIZE
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    wait_for_earlier(PDL)
    x = tl.load(source + offs, mask=mask, other=0.0)
    tl.store(out_ptr + row * SIZE + offs, normalise(x, weight, eps, SIZE), mask=mask)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < SIZE
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    wait_for_earlier(PDL)
    x = tl.load(x_ptr + row * SIZE + offs, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * SIZE + offs, mask=mask, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row * SIZE + offs, total, mask=mask)
    tl.store(out_ptr + row * SIZE + offs, normalise(total, weight, eps, SIZE), mask=mask)


def _warps(size: int) -> int:
    return 1 if size <= 256 else 4 if size <= 2048 else 8 if size <= 4096 else 16


@cached
def _bound_norm(dtype: torch.dtype, stride: int, heads: int, size: int) -> Prebound:
    return Prebound(_rms_norm_kernel, (stride, heads, size, next_power_of_2(size)), num_warps=_warps(size), pdl=True)


@cached
def _bound_add_norm(dtype: torch.dtype, size: int) -> Prebound:
    return Prebound(_add_rms_norm_kernel, (size, next_power_of_2(size)), num_warps=_warps(size), pdl=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (T, n) or (T, heads, n), contiguous inside a token -> the same shape, contiguous. Leaves x alone."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * heads
    if rows:
        _bound_norm(x.dtype, x.stride(0), heads, x.shape[-1])((rows, 1, 1), (x, weight, out), (eps,))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, in_place: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)`, with `in_place` where x and residual were; both (T, n), contiguous."""
    rows, size = x.shape
    out, total = (x, residual) if in_place else (torch.empty_like(x), torch.empty_like(residual))
    if rows:
        _bound_add_norm(x.dtype, size)((rows, 1, 1), (x, residual, weight, out, total), (eps,))
    return out, total
