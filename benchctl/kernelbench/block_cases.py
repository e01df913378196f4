"""Cases of the projections of one token with a norm between them, at the sizes of the Qwen3-0.6B shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchctl.kernelbench.case import Case, Instance

_SIZES = {"o": (1024, 2048), "down": (1024, 3072), "qkv": (4096, 1024), "gate_up": (6144, 1024)}
_SMALL = {"add": (64, 512), "norm": (36, 576), "norm_gated": (96, 1024)}
_EPS = 1e-5


def block_cases(device: torch.device, dtype: torch.dtype, *, small: bool) -> Iterator[Case]:
    """A projection that adds the residual stream, and those that normalise what they read."""
    for kind, label in (("add", "o"), ("add", "down"), ("norm", "qkv"), ("norm_gated", "gate_up")):
        if small and label == "down":
            continue
        n, k = _SMALL[kind] if small else _SIZES[label]
        yield _case(device, dtype, kind, label, n, k)


def _case(device: torch.device, dtype: torch.dtype, kind: str, label: str, n: int, k: int) -> Case:
    def build(seed: int) -> Instance:
        from server.kernels.norm_gemv import add_gemv, norm_gated_gemv, norm_gemv

        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

        x, weight, residual, norm = normal(1, k), normal(n, k) * k**-0.5, normal(1, n), normal(k)
        if kind == "add":
            return Instance(
                lambda: (add_gemv(x, weight, None, residual),),
                lambda: (F.linear(x.float(), weight.float()) + residual.float(),),
            )

        def handed_on(out: torch.Tensor) -> torch.Tensor:
            # Layer after layer in fp32, but what one hands to the next is of the model's dtype, as in the launches that
            # these replace: three layers of bfloat16 are off by more than one may be, whoever computes them.
            return out.to(dtype).float()

        def expected() -> tuple[torch.Tensor, ...]:
            normal = handed_on(handed_on(F.rms_norm(x.float(), (k,), None, _EPS)) * norm.float())
            out = F.linear(normal, weight.float())
            if kind == "norm":
                return (out,)
            gate, up = handed_on(out).chunk(2, dim=-1)
            return (F.silu(gate) * up,)

        function = norm_gemv if kind == "norm" else norm_gated_gemv
        return Instance(lambda: (function(x, norm, _EPS, weight, None),), expected)

    moved = dtype.itemsize * (n * k + n + 2 * k)
    return Case(f"linear/{kind}_gemv", f"{label} 1 x {n} x {k}", dtype, moved, 2 * n * k, build)
