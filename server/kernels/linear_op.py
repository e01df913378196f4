"""`torch.ops.benchserve.linear` and `gated_linear`: projections that pick their kernel by the number of rows they get.

Opaque to Dynamo and Inductor, so a compiled piece keeps the choice until it runs, which is when a CUDA Graph of a given
size is captured (`server.kernels.gemv.config_for`): those of few tokens hold the GEMV, large ones hold cuBLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from server.kernels.activation import silu_and_mul
from server.kernels.gemv import config_for, gated_gemv, gemv, supports


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`: x (M, K), weight (N, K), bias (N,) -> (M, N). CUDA tensors."""
    config = config_for(x.shape[0], *weight.shape)
    if config is None or not x.is_contiguous() or not supports(weight):
        return F.linear(x, weight, bias)
    return gemv(x, weight, bias, config=config)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`silu(gate) * up` of the merged projection `linear(x, weight, bias)`: x (M, K), weight (2N, K) -> (M, N)."""
    config = config_for(x.shape[0], *weight.shape, gated=True)
    if config is None or not x.is_contiguous() or not supports(weight):
        return silu_and_mul(linear(x, weight, bias))
    return gated_gemv(x, weight, bias, config=config)


def _gated_linear_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def _gated_linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


# A Library definition costs a call 2.8 us against 24 us through `torch.library.custom_op`.
_library = torch.library.Library("benchserve", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("linear", linear, "CUDA")
_library.impl("linear", F.linear, "CPU")
torch.library.register_fake("benchserve::linear", _linear_fake, lib=_library)
_library.define("gated_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("gated_linear", gated_linear, "CUDA")
_library.impl("gated_linear", _gated_linear_cpu, "CPU")
torch.library.register_fake("benchserve::gated_linear", _gated_linear_fake, lib=_library)
