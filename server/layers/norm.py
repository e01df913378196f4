"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import nn

from server.layers.kernel_layer import KernelLayer


class RMSNorm(KernelLayer):
    """`x / rms(x) * weight` over the last dimension, computed in float32 (Zhang & Sennrich 2019).

    With `residual`, first adds it: returns `(norm(x + residual), x + residual)`, the pattern that kernels fuse. The
    sum is rounded to the model's precision before it is normalised, as in the reference implementation.
    """

    kernel_name = "rms_norm"

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x and residual (..., size)."""
        if residual is None:
            return self._normalise(x)
        total = x + residual
        return self._normalise(total), total

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight
