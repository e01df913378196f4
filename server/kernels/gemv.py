"""Matrix times a few vectors, for the projections of a small decode step: as fast as the matrix can be read.

One and two rows of x: one program per output row of the weight (or a few) reads it once in large blocks and accumulates
in fp32. On an H200 this reads 3.6-4.6 TB/s, where cuBLAS's choice for one vector reads 3.3-4.0. More rows need the
tensor cores, where cuBLAS is the better kernel, but for small matrices (`config_for`).

The weight does not depend on the kernel before, so the GEMV reads its first blocks before the wait for that kernel (see
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
"""Most rows of x for which any of these kernels is used."""

_GEMV_ROWS = 2
"""Most rows of x for the GEMV, which has a kernel for each number of them; above, there is one on the tensor cores."""


_UNROLL = 4
"""Blocks per turn of the loop over a row."""


@dataclass(frozen=True, slots=True)
class GemvConfig:
    block_n: int
    """Output columns (rows of the weight) per program."""
    block_k: int
    num_warps: int
    num_stages: int = 1
    """Blocks of the weight that are on their way at a time; the GEMV leaves that to the compiler."""
    ahead: int = 4
    """Most blocks of each row of the weight that a program of the GEMV reads before it waits for x; at least 3."""

    def __post_init__(self) -> None:
        if self.ahead < _UNROLL - 1:
            raise ValueError(f"ahead={self.ahead}: fewer than {_UNROLL - 1} need not leave whole turns of the loop")


# Rows of x -> config; the best of sweeps on one H200 over the 8B shape's projections.
GEMV_TABLE = {1: GemvConfig(1, 1024, 4), 2: GemvConfig(2, 1024, 4)}
GATED_TABLE = {1: GemvConfig(1, 1024, 4), 2: GemvConfig(1, 512, 4)}
SKINNY = GemvConfig(16, 128, 2, 6)

_SKINNY_ROWS = (5, MAX_ROWS)
_SKINNY_ELEMENTS = 6144 * 4096
"""Elements of the largest weight for which the skinny kernel is used."""


@triton.jit
def _load_rows(pointers, column_mask, MASKED: tl.constexpr):
    """A block (BLOCK_N, BLOCK_K) of the weight."""
    if MASKED:
        return tl.load(pointers, mask=column_mask[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _load_x(x_ptr, offs, mask):
    """A block (BLOCK_K,) of a row of x; `mask` is None where all of it lies inside."""
    if mask is None:
        return tl.load(x_ptr + offs).to(tl.float32)
    else:
        return tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_sums(out_ptr, bias_ptr, acc, columns, column_mask, HAS_BIAS: tl.constexpr):
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=column_mask)


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS (one or two) rows of x: BLOCK_N output columns per program, each lane keeping its own partial sums to the
    end."""
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
    acc_1 = acc
    for i in tl.static_range(AHEAD):
        x = _load_x(x_ptr, i * BLOCK_K + offs_k, None)
        weight = ahead[i].to(tl.float32)  # type: ignore[var-annotated]
        acc += weight * x[None, :]
        if ROWS == 2:
            acc_1 += weight * _load_x(x_ptr + K, i * BLOCK_K + offs_k, None)[None, :]
    for k in tl.range(AHEAD * BLOCK_K, K // BLOCK_K * BLOCK_K, BLOCK_K, loop_unroll_factor=UNROLL):
        x = _load_x(x_ptr, k + offs_k, None)
        weight = _load_rows(rows + (k + offs_k)[None, :], column_mask, MASKED).to(tl.float32)
        acc += weight * x[None, :]
        if ROWS == 2:
            acc_1 += weight * _load_x(x_ptr + K, k + offs_k, None)[None, :]
    if K % BLOCK_K:
        offs_tail = K // BLOCK_K * BLOCK_K + offs_k
        tail_mask = offs_tail < K
        x = _load_x(x_ptr, offs_tail, tail_mask)
        mask = column_mask[:, None] & tail_mask[None, :]
        weight = tl.load(rows + offs_tail[None, :], mask=mask, other=0.0).to(tl.float32)
        acc += weight * x[None, :]
        if ROWS == 2:
            acc_1 += weight * _load_x(x_ptr + K, offs_tail, tail_mask)[None, :]
    _store_sums(out_ptr, bias_ptr, acc, columns, column_mask, HAS_BIAS)
    if ROWS == 2:
        _store_sums(out_ptr + N, bias_ptr, acc_1, columns, column_mask, HAS_BIAS)


@triton.jit
def _store_gated(out_ptr, bias_ptr, gates, ups, column, N: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Rounds where the projection and `server.layers.activation.SiluAndMul` round."""
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


@triton.jit
def _gated_gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS (one or two) rows of x: a program makes one column of `silu(gate) * up` from rows n and n + N of the
    weight."""
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
    ups = gates
    gates_1 = gates
    ups_1 = gates
    for i in tl.static_range(AHEAD):
        x = _load_x(x_ptr, i * BLOCK_K + offs_k, None)
        gate = ahead[i][0].to(tl.float32)  # type: ignore[var-annotated]
        gates += gate * x
        up = ahead[i][1].to(tl.float32)
        ups += up * x
        if ROWS == 2:
            x = _load_x(x_ptr + K, i * BLOCK_K + offs_k, None)
            gates_1 += gate * x
            ups_1 += up * x
    for k in tl.range(AHEAD * BLOCK_K, K // BLOCK_K * BLOCK_K, BLOCK_K, loop_unroll_factor=UNROLL):
        x = _load_x(x_ptr, k + offs_k, None)
        gate = tl.load(gate_row + k + offs_k).to(tl.float32)
        gates += gate * x
        up = tl.load(up_row + k + offs_k).to(tl.float32)
        ups += up * x
        if ROWS == 2:
            x = _load_x(x_ptr + K, k + offs_k, None)
            gates_1 += gate * x
            ups_1 += up * x
    if K % BLOCK_K:
        offs_tail = K // BLOCK_K * BLOCK_K + offs_k
        mask = offs_tail < K
        x = _load_x(x_ptr, offs_tail, mask)
        gate = tl.load(gate_row + offs_tail, mask=mask, other=0.0).to(tl.float32)
        gates += gate * x
        up = tl.load(up_row + offs_tail, mask=mask, other=0.0).to(tl.float32)
        ups += up * x
        if ROWS == 2:
            x = _load_x(x_ptr + K, offs_tail, mask)
            gates_1 += gate * x
            ups_1 += up * x
    _store_gated(out_ptr, bias_ptr, gates, ups, column, N, HAS_BIAS)
    if ROWS == 2:
        _store_gated(out_ptr + N, bias_ptr, gates_1, ups_1, column, N, HAS_BIAS)


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
    """Up to sixteen rows of x on the tensor cores: a (BLOCK_N, K) slice of the weight per program.

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
def _bound(dtype: torch.dtype, k: int, n: int, rows: int, has_bias: bool, config: GemvConfig) -> Prebound:
    """The kernel for that many rows of x; from three on it is one for all."""
    constants: tuple[int, ...]
    if rows <= _GEMV_ROWS:
        constants = (k, n, rows, config.block_n, config.block_k, _blocks_ahead(k, config), _UNROLL, has_bias)
        return Prebound(_gemv_kernel, constants, num_warps=config.num_warps, num_stages=1, pdl=True)
    constants = (k, n, config.block_n, config.block_k, has_bias, INTERPRETED)
    return Prebound(_skinny_kernel, constants, num_warps=config.num_warps, num_stages=config.num_stages)


def supports(weight: torch.Tensor) -> bool:
    """Whether these kernels can multiply by this weight: half precision, contiguous, rows of whole 16-byte vectors."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return half and weight.is_contiguous() and weight.shape[1] % 8 == 0


def config_for(rows: int, n: int, k: int) -> GemvConfig | None:
    """Which kernel multiplies `rows` rows of x by a weight (n, k): the parameters for `gemv`, or None: cuBLAS.

    From sweeps on one H200. One and two rows: the GEMV everywhere. Three and four: cuBLAS. Five to eight: the skinny
    kernel, as long as the matrix is so small that cuBLAS does not fill the device with it. More: cuBLAS.
    """
    if 0 < rows <= _GEMV_ROWS:
        return GEMV_TABLE[rows]
    if _SKINNY_ROWS[0] <= rows <= _SKINNY_ROWS[1] and n * k <= _SKINNY_ELEMENTS:
        return SKINNY
    return None


def rows_to_warm_up(n: int, k: int) -> list[int]:
    """Numbers of rows which together meet every kernel that `config_for` can choose for a weight (n, k)."""
    return [rows for rows in (*range(1, _GEMV_ROWS + 1), _SKINNY_ROWS[0]) if config_for(rows, n, k) is not None]


def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, config: GemvConfig | None = None
) -> torch.Tensor:
    """x (M, K) contiguous with 1 <= M <= MAX_ROWS, weight (N, K) for which `supports` holds -> (M, N). Without a
    `config` that for M, even where cuBLAS is the better choice."""
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if config is None:
        config = GEMV_TABLE.get(rows, SKINNY)
    skinny = rows > _GEMV_ROWS
    kernel = _bound(x.dtype, k, n, min(rows, _GEMV_ROWS + 1), bias is not None, config)
    tensors = (x, weight, weight if bias is None else bias, out)
    kernel((-(-n // config.block_n), 1, 1), tensors, (rows,) if skinny else ())
    return out


@cached
def _bound_gated(dtype: torch.dtype, k: int, n: int, rows: int, has_bias: bool, config: GemvConfig) -> Prebound:
    constants = (k, n, rows, config.block_k, _blocks_ahead(k, config), _UNROLL, has_bias)
    return Prebound(_gated_gemv_kernel, constants, num_warps=config.num_warps, num_stages=1, pdl=True)


def gated_gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, config: GemvConfig | None = None
) -> torch.Tensor:
    """`silu(gate) * up` of a merged projection: x (M, K) contiguous with M a key of `GATED_TABLE`, weight (2N, K) that
    `supports` admits -> (M, N)."""
    rows, k = x.shape
    n = weight.shape[0] // 2
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    kernel = _bound_gated(x.dtype, k, n, rows, bias is not None, config or GATED_TABLE[rows])
    kernel((n, 1, 1), (x, weight, weight if bias is None else bias, out))
    return out
