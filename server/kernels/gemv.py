"""Matrix times one to eight vectors, for the projections of a small decode step: as fast as the matrix can be read.

One program per output row (or a few) reads the row once in large blocks and accumulates in fp32. On an H200 this reads
3.6-4.6 TB/s, where cuBLAS's choice for one vector reads 3.3-4.0. Above `MAX_ROWS` the tensor cores are needed and
cuBLAS is the better kernel.

The weight does not depend on the kernel before, so its first blocks are read before the wait for that kernel (see
`server.kernels.launch`): memory stays busy while one kernel ends and the next begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from server.kernels.launch import INTERPRETED, Prebound, cached, start_dependents, wait_for_earlier
from server.kernels.paged_tiles import multiply_add

MAX_ROWS = 8
"""Most rows of x for which this kernel is used."""


@dataclass(frozen=True, slots=True)
class GemvConfig:
    block_n: int
    """Output columns (rows of the weight) per program."""
    block_k: int
    num_warps: int
    num_stages: int
    """Blocks of the weight that are on their way at a time; 0: leave it to the compiler."""
    ahead: int = 4
    """Most blocks of each row of the weight that a program of one row reads before it waits for x."""


# Upper bound of the rows of x -> config, in order; the best of a sweep on one H200 over the 8B shape's projections.
GEMV_TABLE: dict[int, GemvConfig] = {
    1: GemvConfig(1, 1024, 4, 0),
    MAX_ROWS: GemvConfig(16, 256, 4, 4),
}


_UNROLL = 4
"""Blocks per turn of the loop over a row."""


@triton.jit
def _load_rows(pointers, column_mask, MASKED: tl.constexpr):
    """A block (BLOCK_N, BLOCK_K) of the weight."""
    if MASKED:
        return tl.load(pointers, mask=column_mask[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x: BLOCK_N output columns per program, each lane keeping its own partial sums to the end."""
    start_dependents(PDL)
    MASKED: tl.constexpr = N % BLOCK_N != 0
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    offs_k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    ahead = ()
    for i in tl.static_range(AHEAD):
        block = _load_rows(rows + (i * BLOCK_K + offs_k)[None, :], column_mask, MASKED)
        ahead = ahead + (block,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no (*ahead, block)
    wait_for_earlier(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for i in tl.static_range(AHEAD):
        x = tl.load(x_ptr + i * BLOCK_K + offs_k).to(tl.float32)
        acc += ahead[i].to(tl.float32) * x[None, :]
    for k in tl.range(AHEAD * BLOCK_K, K // BLOCK_K * BLOCK_K, BLOCK_K, loop_unroll_factor=UNROLL):
        x = tl.load(x_ptr + k + offs_k).to(tl.float32)
        weight = _load_rows(rows + (k + offs_k)[None, :], column_mask, MASKED)
        acc += weight.to(tl.float32) * x[None, :]
    if K % BLOCK_K:
        offs_tail = K // BLOCK_K * BLOCK_K + offs_k
        tail_mask = offs_tail < K
        x = tl.load(x_ptr + offs_tail, mask=tail_mask, other=0.0).to(tl.float32)
        weight = tl.load(rows + offs_tail[None, :], mask=column_mask[:, None] & tail_mask[None, :], other=0.0)
        acc += weight.to(tl.float32) * x[None, :]
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=column_mask)


@triton.jit
def _gated_gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x: a program makes one element of `silu(gate) * up` from rows n and n + N of the weight. Rounds where
    the projection and `server.layers.activation.SiluAndMul` round."""
    start_dependents(PDL)
    column = tl.program_id(0)
    offs_k = tl.arange(0, BLOCK_K)
    gate_row = weight_ptr + column.to(tl.int64) * K
    up_row = gate_row + N * K
    ahead = ()
    for i in tl.static_range(AHEAD):
        offs = i * BLOCK_K + offs_k
        blocks = (tl.load(gate_row + offs), tl.load(up_row + offs))
        ahead = ahead + (blocks,)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_earlier(PDL)
    gates = tl.zeros((BLOCK_K,), dtype=tl.float32)
    ups = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for i in tl.static_range(AHEAD):
        x = tl.load(x_ptr + i * BLOCK_K + offs_k).to(tl.float32)
        gates += ahead[i][0].to(tl.float32) * x
        ups += ahead[i][1].to(tl.float32) * x
    for k in tl.range(AHEAD * BLOCK_K, K // BLOCK_K * BLOCK_K, BLOCK_K, loop_unroll_factor=UNROLL):
        x = tl.load(x_ptr + k + offs_k).to(tl.float32)
        gates += tl.load(gate_row + k + offs_k).to(tl.float32) * x
        ups += tl.load(up_row + k + offs_k).to(tl.float32) * x
    if K % BLOCK_K:
        offs_tail = K // BLOCK_K * BLOCK_K + offs_k
        mask = offs_tail < K
        x = tl.load(x_ptr + offs_tail, mask=mask, other=0.0).to(tl.float32)
        gates += tl.load(gate_row + offs_tail, mask=mask, other=0.0).to(tl.float32) * x
        ups += tl.load(up_row + offs_tail, mask=mask, other=0.0).to(tl.float32) * x
    gate = tl.sum(gates, 0)
    up = tl.sum(ups, 0)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + column).to(tl.float32)
        up += tl.load(bias_ptr + N + column).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + column, (silu * up).to(dtype))


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Two to sixteen rows of x on the tensor cores: a (BLOCK_N, K) slice of the weight per program.

    Not a dependent of the kernel before: as one, with the first blocks of the weight fetched into L2 while it waits, a
    step of eight rows took a fifth longer on an H200.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    offs_m = tl.arange(0, 16)
    row_mask = offs_m < num_rows
    offs_k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    acc = tl.zeros((16, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        k_mask = k + offs_k < K
        x = tl.load(
            x_ptr + offs_m[:, None] * K + (k + offs_k)[None, :], mask=row_mask[:, None] & k_mask[None, :], other=0.0
        )
        weight = tl.load(rows + (k + offs_k)[None, :], mask=column_mask[:, None] & k_mask[None, :], other=0.0)
        acc = multiply_add(x, tl.trans(weight), acc, UPCAST)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + offs_m[:, None] * N + columns[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


def _blocks_ahead(k: int, config: GemvConfig) -> int:
    """Blocks of a row of `k` elements to read before the wait: all, or so many that whole turns of the loop are left. A
    remainder would let the compiler unroll the loop of a long row altogether, into three times the registers."""
    blocks = k // config.block_k
    return blocks if blocks <= config.ahead else config.ahead - (config.ahead - blocks) % _UNROLL


@cached
def _bound(dtype: torch.dtype, k: int, n: int, skinny: bool, has_bias: bool, config: GemvConfig) -> Prebound:
    constants: tuple[int, ...] = (k, n, config.block_n, config.block_k)
    if skinny:
        kernel, constants = _skinny_kernel, (*constants, has_bias, INTERPRETED)
    else:
        kernel, constants = _gemv_kernel, (*constants, _blocks_ahead(k, config), _UNROLL, has_bias)
    warps, stages = config.num_warps, max(config.num_stages, 1)
    return Prebound(kernel, constants, num_warps=warps, num_stages=stages, pdl=not skinny)


def supports(weight: torch.Tensor) -> bool:
    """Whether `gemv` can multiply by this weight: half precision, contiguous, rows of whole 16-byte vectors."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return half and weight.is_contiguous() and weight.shape[1] % 8 == 0


def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, config: GemvConfig | None = None
) -> torch.Tensor:
    """x (M, K) contiguous with 1 <= M <= MAX_ROWS, weight (N, K) for which `supports` holds -> (M, N)."""
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if config is None:
        config = GEMV_TABLE[1] if rows == 1 else GEMV_TABLE[MAX_ROWS]
    skinny = rows > 1
    kernel = _bound(x.dtype, k, n, skinny, bias is not None, config)
    tensors = (x, weight, weight if bias is None else bias, out)
    kernel((-(-n // config.block_n), 1, 1), tensors, (rows,) if skinny else ())
    return out


@cached
def _bound_gated(dtype: torch.dtype, k: int, n: int, has_bias: bool) -> Prebound:
    config = GEMV_TABLE[1]
    constants = (k, n, config.block_k, _blocks_ahead(k, config), _UNROLL, has_bias)
    return Prebound(_gated_gemv_kernel, constants, num_warps=config.num_warps, num_stages=1, pdl=True)


def gated_gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`silu(gate) * up` of a merged projection: x (1, K) contiguous, weight (2N, K) that `supports` admits; (1, N)."""
    k, n = weight.shape[1], weight.shape[0] // 2
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    kernel = _bound_gated(x.dtype, k, n, bias is not None)
    kernel((n, 1, 1), (x, weight, weight if bias is None else bias, out))
    return out
