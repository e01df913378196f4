"""Sampling from logits without a sort: greedy, temperature, top-k and top-p.

Sampling is an argmax of `logit / temperature + Gumbel noise` (the Gumbel-max trick), which needs no normalisation and
reads the logits once. Top-k and top-p become one threshold per row: the largest value that keeps k logits, then the
largest that keeps probability p of what top-k left. Both are found by bisecting over the bits of the float, in the
order that makes them sort as integers, so the threshold is exact. Logits equal to the threshold are all kept.

The noise is that of `server.worker.noise`, word for word: a request draws the same with these kernels and without.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.kernels.launch import Prebound, cached, start_dependents, wait_for_earlier

_CHUNK = 8192
_TILE = 4096


@triton.jit
def _sortable(x):
    """Integer keys in the order of the floats `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _threshold_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    threshold_ptr,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    limit_k = (top_k > 0) & (top_k < VOCAB)
    limit_p = top_p < 1.0
    if (temperature <= 0.0) | ((limit_k | limit_p) == 0):
        tl.store(threshold_ptr + row, float("-inf"))
        return
    logits = logits_ptr + row.to(tl.int64) * STRIDE
    offs = tl.arange(0, TILE)
    top = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    for start in tl.range(0, VOCAB, TILE):
        x = tl.load(logits + start + offs, mask=start + offs < VOCAB, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, x)
    maximum = tl.max(top, 0)
    # -inf and +inf in the order of `_sortable`, as 64-bit integers so that their sum cannot overflow.
    highest = _sortable(maximum).to(tl.int64)
    low = tl.full((), -2139095041, dtype=tl.int64)
    if limit_k:
        high = highest
        while low < high:
            middle = (low + high + 1) >> 1
            count = tl.zeros((TILE,), dtype=tl.int32)
            for start in tl.range(0, VOCAB, TILE):
                x = tl.load(logits + start + offs, mask=start + offs < VOCAB, other=float("-inf")).to(tl.float32)
                count += (_sortable(x) >= middle.to(tl.int32)).to(tl.int32)
            kept = tl.sum(count, 0)
            if kept >= top_k:
                low = middle
                if kept == top_k:
                    high = middle
            else:
                high = middle - 1
    if limit_p:
        floor = low.to(tl.int32)
        mass = tl.zeros((TILE,), dtype=tl.float32)
        for start in tl.range(0, VOCAB, TILE):
            x = tl.load(logits + start + offs, mask=start + offs < VOCAB, other=float("-inf")).to(tl.float32)
            weight = tl.exp((x - maximum) / temperature)
            mass += tl.where(_sortable(x) >= floor, weight, 0.0)
        wanted = tl.sum(mass, 0) * top_p
        high = highest
        while low < high:
            middle = (low + high + 1) >> 1
            mass = tl.zeros((TILE,), dtype=tl.float32)
            for start in tl.range(0, VOCAB, TILE):
                x = tl.load(logits + start + offs, mask=start + offs < VOCAB, other=float("-inf")).to(tl.float32)
                weight = tl.exp((x - maximum) / temperature)
                mass += tl.where(_sortable(x) >= middle.to(tl.int32), weight, 0.0)
            if tl.sum(mass, 0) >= wanted:
                low = middle
            else:
                high = middle - 1
    key = low.to(tl.int32)
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    tl.store(threshold_ptr + row, bits.to(tl.float32, bitcast=True))


@triton.jit
def _mix(x):
    """Permute uint32 words (see `server.worker.noise`)."""
    x = x ^ (x >> 15)
    x = x * 0x2C1B3C6D
    x = x ^ (x >> 12)
    x = x * 0x297A2D39
    return x ^ (x >> 15)


@triton.jit
def _gumbel(seed, position, token_ids):
    """Standard Gumbel noise for one request's seed and position, int64, and token ids (N,)."""
    key = _mix(seed.to(tl.uint32) ^ 0x5BD1E995)
    key = _mix(key ^ (seed >> 32).to(tl.uint32))
    offset = _mix(key + position.to(tl.uint32) * 0x1E3779B9)
    stride = (_mix(offset ^ 0x3C6EF372) >> 1) | 1
    word = _mix(token_ids.to(tl.uint32) * stride + offset)
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log1p(-u): near 0, where the winners are, 1 - u would lose the bits that tell them apart.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * (0.25 + uniform * 0.2))))
    exponential = tl.where(uniform < 0.01, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _chunk_argmax_kernel(
    logits_ptr,
    temperature_ptr,
    threshold_ptr,
    seed_ptr,
    position_ptr,
    values_ptr,
    indices_ptr,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    RANDOM: tl.constexpr,
    LIMITED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_dependents(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    offs = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = offs < VOCAB
    x = tl.load(logits_ptr + row.to(tl.int64) * STRIDE + offs, mask=mask, other=float("-inf")).to(tl.float32)
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            if LIMITED:
                x = tl.where(x >= tl.load(threshold_ptr + row), x, float("-inf"))
            x = x / temperature + _gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), offs)
    # A NaN compares as smaller than everything: a row of NaNs yields its first token rather than no token.
    x = tl.where(mask & (x == x), x, float("-inf"))
    value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    cell = row * tl.num_programs(1) + chunk
    tl.store(values_ptr + cell, value)
    tl.store(indices_ptr + cell, chunk * CHUNK + index)


@triton.jit(do_not_specialize=["num_chunks"])
def _merge_argmax_kernel(values_ptr, indices_ptr, out_ptr, num_chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_dependents(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < num_chunks
    values = tl.load(values_ptr + row * num_chunks + offs, mask=mask, other=float("-inf"))
    # Chunks are in the order of their tokens, so the first of equal chunks holds the smallest token.
    _, best = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(indices_ptr + row * num_chunks + best).to(tl.int64))


@cached
def _bound_threshold(dtype: torch.dtype, top_k_dtype: torch.dtype, stride: int, vocab: int) -> Prebound:
    return Prebound(_threshold_kernel, (stride, vocab, _TILE), num_warps=16, pdl=True)


@cached
def _bound_chunk(
    dtype: torch.dtype, position_dtype: torch.dtype, stride: int, vocab: int, random: bool, limited: bool
) -> Prebound:
    return Prebound(_chunk_argmax_kernel, (stride, vocab, _CHUNK, random, limited), num_warps=8, pdl=True)


@cached
def _bound_merge(block: int) -> Prebound:
    return Prebound(_merge_argmax_kernel, (block,), num_warps=1, pdl=True)


def _reduce(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    threshold: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    random: bool,
    limited: bool,
) -> torch.Tensor:
    rows, vocab = logits.shape
    chunks = -(-vocab // _CHUNK)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    values = torch.empty(rows * chunks, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows * chunks, dtype=torch.int32, device=logits.device)
    kernel = _bound_chunk(logits.dtype, positions.dtype, logits.stride(0), vocab, random, limited)
    kernel(
        (rows, chunks, 1),
        (logits, temperature, threshold, seeds, positions, values, indices),
    )
    _bound_merge(triton.next_power_of_2(chunks))((rows, 1, 1), (values, indices, out), (chunks,))
    return out


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits (S, V) -> the index of the largest of each row, the first of equal ones, int64 (S,)."""
    return _reduce(logits, logits, logits, logits, logits, random=False, limited=False)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token for each row of logits (S, V); int64 (S,).

    `temperature` float32 (S,), 0: greedy. `seeds` int64 (S,), one per request, and `positions` int64 (S,), the token's
    place in it: equal pairs draw equal noise, so a request is reproducible in any batch. `top_k` int32 or int64 (S,),
    <= 0 or the vocabulary's size: all; `top_p` float32 (S,), >= 1: all. Leave both None when no row limits its choice:
    a threshold costs some thirty reads of the row.
    """
    limited = top_k is not None or top_p is not None
    threshold = temperature
    if limited and logits.shape[0]:
        rows, vocab = logits.shape
        if top_k is None:
            top_k = torch.zeros(rows, dtype=torch.int64, device=logits.device)
        if top_p is None:
            top_p = torch.ones(rows, dtype=torch.float32, device=logits.device)
        threshold = torch.empty(rows, dtype=torch.float32, device=logits.device)
        kernel = _bound_threshold(logits.dtype, top_k.dtype, logits.stride(0), vocab)
        kernel((rows, 1, 1), (logits, temperature, top_k, top_p, threshold))
    return _reduce(logits, temperature, threshold, seeds, positions, random=True, limited=limited)
