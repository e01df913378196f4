"""Activation of the gated feed-forward network."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from server.layers.kernel_layer import KernelLayer


class SiluAndMul(KernelLayer):
    """`silu(gate) * up` of a merged `(..., 2 * n)` projection; returns `(..., n)`."""

    kernel_name = "silu_and_mul"

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
