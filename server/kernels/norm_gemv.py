"""The projections of one token with the norm between them: two launches where three kernels stood.

`residual + x @ o.T`, RMSNorm, and the next projection: the first GEMV adds the residual stream to what it has summed,
and every program of the second normalises the whole row for itself, which it has to read in any case. That pays where
rows are short and a step is a chain of kernels of 2 to 5 us. Where they are long the norm by itself takes no time, as
the projection after it reads its weight meanwhile, but within every program it would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from server.kernels.gemv import supports
from server.kernels.launch import Prebound, cached, next_power_of_2, start_dependents, wait_for_earlier

LONGEST_NORM = 2048
"""On one H200 a layer's projections and norms of one token take 13.1 us in this form against 17.6 where rows are of
1024 elements (the Qwen3-0.6B shape), and 34.8 against 36.6 at 2048. At 4096 they took 105.8 against 105.6."""


@triton.jit
def _row(pointer, offs, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A block of one row (BLOCK_N, BLOCK_K), the same for all columns: each warp reads what it multiplies."""
    return tl.load(tl.broadcast_to(pointer + offs[None, :], (BLOCK_N, BLOCK_K)))


@triton.jit
def _add_gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N elements of `residual + x @ weight.T + bias` per program; rounds the projection before it adds."""
    start_dependents(PDL)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    ahead = ()
    for i in tl.static_range(AHEAD):
        ahead = ahead + (tl.load(rows + (i * BLOCK_K + offs_k)[None, :]),)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_earlier(PDL)
    residual = tl.load(residual_ptr + columns).to(tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for i in tl.static_range(AHEAD):
        acc += ahead[i].to(tl.float32) * _row(x_ptr, i * BLOCK_K + offs_k, BLOCK_N, BLOCK_K).to(tl.float32)
    for k in tl.range(AHEAD * BLOCK_K, K, BLOCK_K):
        weight = tl.load(rows + (k + offs_k)[None, :]).to(tl.float32)
        acc += weight * _row(x_ptr, k + offs_k, BLOCK_N, BLOCK_K).to(tl.float32)
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + columns, (total.to(dtype).to(tl.float32) + residual).to(dtype))


@triton.jit
def _normalised(x_ptr, norms, offs_k, eps, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The row at `x_ptr` after RMSNorm, as a tuple of fp32 blocks; rounds where `server.kernels.norm` rounds."""
    blocks = ()
    squares = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for i in tl.static_range(K // BLOCK_K):
        x = _row(x_ptr, i * BLOCK_K + offs_k, BLOCK_N, BLOCK_K)
        blocks = blocks + (x,)  # type: ignore[assignment]  # noqa: RUF005
        squares += x.to(tl.float32) * x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    normal = ()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for i in tl.static_range(K // BLOCK_K):
        y = (blocks[i].to(tl.float32) * scale).to(dtype).to(tl.float32) * norms[i].to(tl.float32)
        normal = normal + (y.to(dtype).to(tl.float32),)  # noqa: RUF005
    return normal


@triton.jit
def _norm_gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N elements of `rms_norm(x) @ weight.T + bias` per program; GATED: of `silu(gate) * up`, gate and up being
    rows n and n + N of the weight."""
    start_dependents(PDL)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    ahead = ()
    above = ()
    norms = ()
    for i in tl.static_range(K // BLOCK_K):
        offs = i * BLOCK_K + offs_k
        ahead = ahead + (tl.load(rows + offs[None, :]),)  # type: ignore[assignment]  # noqa: RUF005
        if GATED:
            above = above + (tl.load(rows + N * K + offs[None, :]),)  # type: ignore[assignment]  # noqa: RUF005
        norms = norms + (_row(norm_ptr, offs, BLOCK_N, BLOCK_K),)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_earlier(PDL)
    normal = _normalised(x_ptr, norms, offs_k, eps, K, BLOCK_N, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    acc_up = acc
    for i in tl.static_range(K // BLOCK_K):
        acc += ahead[i].to(tl.float32) * normal[i]
        if GATED:
            acc_up += above[i].to(tl.float32) * normal[i]
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        up = tl.sum(acc_up, 1)
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + columns).to(tl.float32)
        gate = total.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        total = silu * up.to(dtype).to(tl.float32)
    tl.store(out_ptr + columns, total.to(dtype))


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """How many elements of the weight a program reads, in blocks of whole warps' reads."""

    elements: int
    """Output columns times length of a row; for a gated projection of each of its halves."""
    num_warps: int
    block_k: int = 256


# The best of a sweep on one H200 over rows of 1024 and 2048 elements.
ADD = BlockConfig(4096, 4)
NORM = BlockConfig(8192, 4)
NORM_GATED = BlockConfig(8192, 4)

_MOST_BLOCKS = 12
"""Blocks of a row that are on their way, or held, at a time."""


def fits(add: torch.Tensor, norm: torch.Tensor, project: torch.Tensor) -> bool:
    """Whether these kernels can, and should, run a projection (N, K), a norm (N,) and the next projection (M, N)."""
    size = norm.shape[0]
    halves = norm.dtype == add.dtype == project.dtype and supports(add) and supports(project)
    return halves and size <= LONGEST_NORM and size // _power_of_2(size, NORM.block_k) <= _MOST_BLOCKS


def _power_of_2(size: int, most: int) -> int:
    """The largest power of two that divides `size`, up to `most`."""
    return min(size & -size, most)


def _block(n: int, k: int, config: BlockConfig) -> tuple[int, int]:
    """Columns and elements of a block, powers of two which divide n and k."""
    return _power_of_2(n, next_power_of_2(max(1, config.elements // k))), _power_of_2(k, config.block_k)


@cached
def _bound_add(dtype: torch.dtype, n: int, k: int, has_bias: bool, config: BlockConfig) -> tuple[Prebound, int]:
    block_n, block_k = _block(n, k, config)
    ahead = min(k // block_k, _MOST_BLOCKS)
    constants = (k, block_n, block_k, ahead, has_bias)
    return Prebound(_add_gemv_kernel, constants, num_warps=config.num_warps, num_stages=1, pdl=True), block_n


@cached
def _bound_norm(
    dtype: torch.dtype, n: int, k: int, gated: bool, has_bias: bool, config: BlockConfig
) -> tuple[Prebound, int]:
    block_n, block_k = _block(n, k, config)
    constants = (k, n, block_n, block_k, gated, has_bias)
    return Prebound(_norm_gemv_kernel, constants, num_warps=config.num_warps, num_stages=1, pdl=True), block_n


def add_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    config: BlockConfig = ADD,
) -> torch.Tensor:
    """`residual + x @ weight.T + bias`: x (1, K), weight (N, K), bias (N,), residual (1, N), contiguous -> (1, N)."""
    n, k = weight.shape
    out = torch.empty_like(residual)
    kernel, block_n = _bound_add(x.dtype, n, k, bias is not None, config)
    kernel((n // block_n, 1, 1), (x, weight, weight if bias is None else bias, residual, out))
    return out


def norm_gemv(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    config: BlockConfig = NORM,
) -> torch.Tensor:
    """`rms_norm(x) @ weight.T + bias`: x (1, K), norm (K,), weight (N, K), bias (N,), contiguous -> (1, N)."""
    n, k = weight.shape
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    kernel, block_n = _bound_norm(x.dtype, n, k, False, bias is not None, config)
    kernel((n // block_n, 1, 1), (x, norm, weight, weight if bias is None else bias, out), (eps,))
    return out


def norm_gated_gemv(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    config: BlockConfig = NORM_GATED,
) -> torch.Tensor:
    """`silu(gate) * up` of the merged projection of `rms_norm(x)`: x (1, K), norm (K,), weight (2N, K) -> (1, N)."""
    n, k = weight.shape[0] // 2, weight.shape[1]
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    kernel, block_n = _bound_norm(x.dtype, n, k, True, bias is not None, config)
    kernel((n // block_n, 1, 1), (x, norm, weight, weight if bias is None else bias, out), (eps,))
    return out
