"""`torch.ops.benchserve.rms_norm` and `add_rms_norm`: the norm kernels inside a compiled graph (`--custom-ops on`).

Opaque to Inductor, which otherwise fuses a norm with its neighbours. They return new tensors: a graph's values must
not change.
"""

from __future__ import annotations

import torch

from server.kernels.norm import add_rms_norm, rms_norm


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(x, residual, weight, eps, in_place=False)


def _rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


def _add_rms_norm_cpu(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return _rms_norm_cpu(total, weight, eps), total


def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _add_rms_norm_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rms_norm_fake(x, weight, eps), _rms_norm_fake(residual, weight, eps)


_library = torch.library.Library("benchserve", "FRAGMENT")
_library.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
_library.define("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)")
_library.impl("rms_norm", rms_norm, "CUDA")
_library.impl("add_rms_norm", _add_rms_norm, "CUDA")
_library.impl("rms_norm", _rms_norm_cpu, "CPU")
_library.impl("add_rms_norm", _add_rms_norm_cpu, "CPU")
torch.library.register_fake("benchserve::rms_norm", _rms_norm_fake, lib=_library)
torch.library.register_fake("benchserve::add_rms_norm", _add_rms_norm_fake, lib=_library)
