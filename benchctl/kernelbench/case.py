"""What is measured: one kernel, one shape, one dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Case:
    """One row of the report. Tensors are built by `build` when the case runs, and dropped after it."""

    kernel: str
    """Kernel or backend, e.g. `rms_norm`, `attention/TRITON_ATTN`."""
    shape: str
    dtype: torch.dtype
    bytes: int
    """Fewest bytes of device memory that must move: each input read once, each output written once."""
    flops: int
    build: Callable[[int], Instance]
    """Builds instance number `seed`; several are rotated through while timing, so that the cache cannot help."""


@dataclass(slots=True)
class Instance:
    """Fresh random inputs of a case."""

    run: Callable[[], Tensors]
    """Launch the kernel on the current stream; returns its outputs."""
    expected: Callable[[], Tensors]
    """The outputs in fp32, computed by plain torch from the same inputs. Called before `run`, which may overwrite."""


def relative_error(actual: Tensors, expected: Tensors) -> float:
    """Largest over the outputs of `||actual - expected|| / ||expected||`; NaN if anything is not finite.

    Integer outputs (sampled tokens) count as the share that differs.
    """
    worst = 0.0
    for got, want in zip(actual, expected, strict=True):
        if want.dtype.is_floating_point:
            error = ((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30)).item()
        else:
            error = (got != want).float().mean().item()
        worst = max(worst, error) if error == error else float("nan")
        if worst != worst:
            return worst
    return worst


def tolerance(dtype: torch.dtype, *, interpreted: bool) -> float:
    """Bound of the relative error. The interpreter truncates to bf16 where the GPU rounds, at every conversion: six in
    the launch of a norm and a gated projection."""
    if dtype is torch.float32:
        return 2e-5
    if dtype is torch.bfloat16 and interpreted:
        return 3e-2
    return 5e-3
