"""Matrix times a few vectors, for the projections of a small decode step: as fast as the matrix can be read.

Up to four rows of x: every program reads a few rows of the weight once and accumulates in fp32. On an H200 this reads
3.6-4.6 TB/s of a large matrix, where cuBLAS's choice for one vector reads 3.3-4.0, and a small one up to six times as
fast as cuBLAS does. More rows need the tensor cores, where cuBLAS is the better kernel, but for small matrices
(`config_for`).

The weight does not depend on the kernel before, so the GEMV reads its first blocks before the wait for that kernel (see
`server.kernels.launch`): memory stays busy while one kernel ends and the next begins. A program has 4096 to 8192
elements of the weight on their way then: with less, many short-lived programs follow one another.
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

_GEMV_ROWS = {1: 1, 2: 2, 3: 4, 4: 4}
"""Rows of x -> rows of the GEMV that serves them; from five on there is one kernel for all, on the tensor cores."""

_SMALL = 4096 * 4096
"""Elements of the largest weight which cuBLAS is too slow to read for three to eight rows."""

_UNROLL = 4
"""Blocks per turn of the loop over a row."""

_VECTOR = 8
"""Elements of the weight that a thread reads at once: 16 bytes."""


@dataclass(frozen=True, slots=True)
class GemvConfig:
    block_n: int
    """Output columns per program."""
    block_k: int
    num_warps: int
    num_stages: int = 1
    """Blocks of the weight that are on their way at a time; the GEMV leaves that to the compiler."""
    ahead: int = 4
    """Most blocks of the weight that a program of the GEMV reads before it waits for x; at least 3."""

    def __post_init__(self) -> None:
        if self.ahead < _UNROLL - 1:
            raise ValueError(f"ahead={self.ahead}: fewer than {_UNROLL - 1} need not leave whole turns of the loop")


@triton.jit
def _load_rows(pointers, column_mask, MASKED: tl.constexpr):
    """A block (BLOCK_N, BLOCK_K) of the weight."""
    if MASKED:
        return tl.load(pointers, mask=column_mask[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _zeros(ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """An accumulator (BLOCK_N, WIDTH) for each row of x."""
    acc = ()
    for _ in tl.static_range(ROWS):
        acc = acc + (tl.zeros((BLOCK_N, WIDTH), dtype=tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return acc


@triton.jit
def _load_x(
    x_ptr,
    row: tl.constexpr,
    num_rows,
    offs,
    mask,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OWN: tl.constexpr,
):
    """A block of a row of x, the last one in the place of one that is missing: (1, BLOCK_K), or with OWN, where each
    column is another warp's, once for each, which saves the exchange. `mask` is None where all of it lies inside."""
    start = tl.minimum(row, num_rows - 1) * K if ROWS > 2 else row * K
    pointers = x_ptr + start + offs[None, :]
    if OWN:
        pointers = tl.broadcast_to(pointers, (BLOCK_N, BLOCK_K))
    if mask is None:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=mask[None, :], other=0.0).to(tl.float32)


@triton.jit
def _sums(product, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr):
    """(BLOCK_N, BLOCK_K // VECTOR): neighbours which one thread holds are added up, so that the accumulators of many
    rows fit into few registers."""
    return tl.sum(tl.reshape(product, (BLOCK_N, BLOCK_K // VECTOR, VECTOR)), 2)


@triton.jit
def _add(
    acc,
    weight,
    x_ptr,
    num_rows,
    offs,
    mask,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    OWN: tl.constexpr,
):
    """`acc` with the products of a block of the weight and each row of x."""
    weight = weight.to(tl.float32)
    result = ()
    for row in tl.static_range(ROWS):
        x = _load_x(x_ptr, row, num_rows, offs, mask, K, ROWS, BLOCK_N, BLOCK_K, OWN)
        total = acc[row] + _sums(weight * x, BLOCK_N, BLOCK_K, VECTOR)
        result = result + (total,)  # type: ignore[assignment]  # noqa: RUF005
    return result


@triton.jit
def _add_both(
    gates,
    ups,
    gate,
    up,
    x_ptr,
    num_rows,
    offs,
    mask,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    OWN: tl.constexpr,
):
    """`_add` for two blocks of the weight that are multiplied by the same x."""
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    new_gates = ()
    new_ups = ()
    for row in tl.static_range(ROWS):
        x = _load_x(x_ptr, row, num_rows, offs, mask, K, ROWS, BLOCK_N, BLOCK_K, OWN)
        gate_total = gates[row] + _sums(gate * x, BLOCK_N, BLOCK_K, VECTOR)
        up_total = ups[row] + _sums(up * x, BLOCK_N, BLOCK_K, VECTOR)
        new_gates = new_gates + (gate_total,)  # type: ignore[assignment]  # noqa: RUF005
        new_ups = new_ups + (up_total,)  # type: ignore[assignment]  # noqa: RUF005
    return new_gates, new_ups


@triton.jit
def _is_real(row: tl.constexpr, num_rows, BLOCK_N: tl.constexpr):
    """(BLOCK_N,): whether x has that row."""
    return tl.full((BLOCK_N,), row, dtype=tl.int32) < num_rows


@triton.jit(do_not_specialize=["num_rows"])
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    OWN: tl.constexpr,
    AHEAD: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N output columns per program, each lane keeping its own partial sums to the end. ROWS is `num_rows`, but 4
    for three rows."""
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
    acc = _zeros(ROWS, BLOCK_N, BLOCK_K // VECTOR)
    for i in tl.static_range(AHEAD):
        offs = i * BLOCK_K + offs_k
        acc = _add(acc, ahead[i], x_ptr, num_rows, offs, None, K, ROWS, BLOCK_N, BLOCK_K, VECTOR, OWN)
    for k in tl.range(AHEAD * BLOCK_K, K // BLOCK_K * BLOCK_K, BLOCK_K, loop_unroll_factor=UNROLL):
        block = _load_rows(rows + (k + offs_k)[None, :], column_mask, MASKED)
        acc = _add(acc, block, x_ptr, num_rows, k + offs_k, None, K, ROWS, BLOCK_N, BLOCK_K, VECTOR, OWN)
    if K % BLOCK_K:
        offs = K // BLOCK_K * BLOCK_K + offs_k
        mask = offs < K
        block = tl.load(rows + offs[None, :], mask=column_mask[:, None] & mask[None, :], other=0.0)
        acc = _add(acc, block, x_ptr, num_rows, offs, mask, K, ROWS, BLOCK_N, BLOCK_K, VECTOR, OWN)
    for row in tl.static_range(ROWS):
        total = tl.sum(acc[row], 1)
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * N + columns, out, mask=column_mask & _is_real(row, num_rows, BLOCK_N))


@triton.jit(do_not_specialize=["num_rows"])
def _gated_gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    OWN: tl.constexpr,
    AHEAD: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `_gemv_kernel`, but a program makes columns n of `silu(gate) * up` from rows n and n + N of the weight. Rounds
    where the projection and `server.layers.activation.SiluAndMul` round."""
    start_dependents(PDL)
    MASKED: tl.constexpr = N % BLOCK_N != 0
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    offs_k = tl.arange(0, BLOCK_K)
    gate_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    up_rows = gate_rows + N * K
    ahead = ()
    for i in tl.static_range(AHEAD):
        offs = (i * BLOCK_K + offs_k)[None, :]
        blocks = (_load_rows(gate_rows + offs, column_mask, MASKED), _load_rows(up_rows + offs, column_mask, MASKED))
        ahead = ahead + (blocks,)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_earlier(PDL)
    gates = _zeros(ROWS, BLOCK_N, BLOCK_K // VECTOR)
    ups = _zeros(ROWS, BLOCK_N, BLOCK_K // VECTOR)
    for i in tl.static_range(AHEAD):
        blocks = ahead[i]
        offs = i * BLOCK_K + offs_k
        gates, ups = _add_both(
            gates, ups, blocks[0], blocks[1], x_ptr, num_rows, offs, None, K, ROWS, BLOCK_N, BLOCK_K, VECTOR, OWN
        )
    for k in tl.range(AHEAD * BLOCK_K, K // BLOCK_K * BLOCK_K, BLOCK_K, loop_unroll_factor=UNROLL):
        gate = _load_rows(gate_rows + (k + offs_k)[None, :], column_mask, MASKED)
        up = _load_rows(up_rows + (k + offs_k)[None, :], column_mask, MASKED)
        gates, ups = _add_both(
            gates, ups, gate, up, x_ptr, num_rows, k + offs_k, None, K, ROWS, BLOCK_N, BLOCK_K, VECTOR, OWN
        )
    if K % BLOCK_K:
        offs = K // BLOCK_K * BLOCK_K + offs_k
        mask = offs < K
        both = column_mask[:, None] & mask[None, :]
        gate = tl.load(gate_rows + offs[None, :], mask=both, other=0.0)
        up = tl.load(up_rows + offs[None, :], mask=both, other=0.0)
        gates, ups = _add_both(
            gates, ups, gate, up, x_ptr, num_rows, offs, mask, K, ROWS, BLOCK_N, BLOCK_K, VECTOR, OWN
        )
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for row in tl.static_range(ROWS):
        gate = tl.sum(gates[row], 1)
        up = tl.sum(ups[row], 1)
        if HAS_BIAS:
            gate += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
            up += tl.load(bias_ptr + N + columns, mask=column_mask, other=0.0).to(tl.float32)
        gate = gate.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        tl.store(
            out_ptr + row * N + columns, (silu * up).to(dtype), mask=column_mask & _is_real(row, num_rows, BLOCK_N)
        )


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


def supports(weight: torch.Tensor) -> bool:
    """Whether these kernels can multiply by this weight: half precision, contiguous, rows of whole 16-byte vectors."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return half and weight.is_contiguous() and weight.shape[1] % _VECTOR == 0


def config_for(rows: int, n: int, k: int, *, gated: bool = False) -> GemvConfig | None:
    """Which kernel multiplies `rows` rows of x by a weight (n, k): the parameters for `gemv`, or with `gated` for
    `gated_gemv`, or None: cuBLAS.

    From sweeps on one H200 over the matrices of the 8B and the Qwen3-0.6B shape. One and two rows: the GEMV everywhere.
    Three and four: the GEMV for small matrices. Five to eight: the skinny kernel for small matrices. Else cuBLAS.
    """
    if not 0 < rows <= MAX_ROWS or (rows > 2 and n * k > _SMALL) or (gated and rows not in _GEMV_ROWS):
        return None
    return _best_config(rows, n, k, gated=gated)


def _best_config(rows: int, n: int, k: int, *, gated: bool = False) -> GemvConfig:
    """The best of our kernels, were cuBLAS better or not."""
    if rows not in _GEMV_ROWS:
        # About as many programs as the device has multiprocessors.
        return GemvConfig(32, 128, 4, 5) if n >= 2048 else GemvConfig(8, 256, 1, 5)
    if k < 2048:
        # A warp for each column, and all of a row at once.
        return GemvConfig(4, 256, 4, ahead=8)
    if gated:
        return GemvConfig(1, 1024, 4)
    # Long rows keep a program busy one at a time; more rows of x are read too often, if not for two columns.
    return GemvConfig(1, 1024, 4, ahead=8) if k > 4096 and rows <= 2 else GemvConfig(2, 1024, 4)


def rows_to_warm_up(n: int, k: int) -> list[int]:
    """Numbers of rows which together meet every kernel that can be chosen for a weight (n, k), gated or not."""
    return [rows for rows in (*sorted(set(_GEMV_ROWS.values())), MAX_ROWS) if config_for(rows, n, k) is not None]


def _gemv_constants(k: int, n: int, rows: int, has_bias: bool, config: GemvConfig) -> tuple[int, ...]:
    """Of the GEMV and the gated GEMV."""
    vector = min(_VECTOR, config.block_n * config.block_k // (32 * config.num_warps))
    own = config.block_n > 1 and config.block_k < 32 * _VECTOR * config.num_warps
    blocks = (config.block_n, config.block_k, vector, own, _blocks_ahead(k, config), _UNROLL)
    return (k, n, _GEMV_ROWS[rows], *blocks, has_bias)


@cached
def _bound(dtype: torch.dtype, k: int, n: int, rows: int, has_bias: bool, config: GemvConfig) -> Prebound:
    if rows in _GEMV_ROWS:
        constants = _gemv_constants(k, n, rows, has_bias, config)
        return Prebound(_gemv_kernel, constants, num_warps=config.num_warps, num_stages=1, pdl=True)
    constants = (k, n, config.block_n, config.block_k, has_bias, INTERPRETED)
    return Prebound(_skinny_kernel, constants, num_warps=config.num_warps, num_stages=config.num_stages)


def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, config: GemvConfig | None = None
) -> torch.Tensor:
    """x (M, K) contiguous with 1 <= M <= 16, weight (N, K) for which `supports` holds -> (M, N). Without a `config` the
    best of these kernels, even where cuBLAS is better."""
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if config is None:
        config = _best_config(rows, n, k)
    kernel = _bound(x.dtype, k, n, _shared(rows), bias is not None, config)
    kernel((-(-n // config.block_n), 1, 1), (x, weight, weight if bias is None else bias, out), (rows,))
    return out


def _shared(rows: int) -> int:
    """One number for all numbers of rows that share a kernel."""
    return _GEMV_ROWS.get(rows, MAX_ROWS)


@cached
def _bound_gated(dtype: torch.dtype, k: int, n: int, rows: int, has_bias: bool, config: GemvConfig) -> Prebound:
    constants = _gemv_constants(k, n, rows, has_bias, config)
    return Prebound(_gated_gemv_kernel, constants, num_warps=config.num_warps, num_stages=1, pdl=True)


def gated_gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, config: GemvConfig | None = None
) -> torch.Tensor:
    """`silu(gate) * up` of a merged projection: x (M, K) contiguous with 1 <= M <= 4, weight (2N, K) that `supports`
    admits -> (M, N). Without a `config` the best one, even where cuBLAS and the activation are better."""
    rows, k = x.shape
    n = weight.shape[0] // 2
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if config is None:
        config = _best_config(rows, 2 * n, k, gated=True)
    kernel = _bound_gated(x.dtype, k, n, _shared(rows), bias is not None, config)
    kernel((-(-n // config.block_n), 1, 1), (x, weight, weight if bias is None else bias, out), (rows,))
    return out
