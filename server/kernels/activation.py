"""`silu(gate) * up`. Rounds where `server.layers.activation.SiluAndMul` rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.kernels.launch import Prebound, cached, start_dependents, wait_for_earlier

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_dependents(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    gate = tl.load(x_ptr + row * (2 * SIZE) + offs, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * SIZE) + SIZE + offs, mask=mask)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    product = (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype)
    tl.store(out_ptr + row * SIZE + offs, product, mask=mask)


@cached
def _bound(dtype: torch.dtype, size: int) -> Prebound:
    return Prebound(_silu_and_mul_kernel, (size, _BLOCK), num_warps=4, pdl=True)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up (T, 2 * n), contiguous -> (T, n)."""
    rows, width = gate_up.shape
    size = width // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _bound(gate_up.dtype, size)((rows, -(-size // _BLOCK), 1), (gate_up, out))
    return out
