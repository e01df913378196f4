"""Cases of the projections: the kernels that small decode steps use, and cuBLAS beside them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchctl.kernelbench.case import Case, Instance

# Output and input features of the 8B shape's matrices.
MATRICES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
# Of the Qwen3-0.6B shape, for sweeps.
SHORT_MATRICES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
SMALL_MATRICES = {"even": (64, 512), "ragged": (37, 600)}


def linear_cases(
    device: torch.device, dtype: torch.dtype, rows: list[int], *, small: bool, with_cublas: bool = False
) -> Iterator[Case]:
    for label, (n, k) in (SMALL_MATRICES if small else MATRICES).items():
        for m in rows:
            yield _case(device, dtype, "gemv", label, m, n, k, bias=label == "ragged")
            if m <= 2 and label in ("gate_up", "even"):
                yield _gated(device, dtype, label, m, n, k)
            if with_cublas:
                yield _case(device, dtype, "cublas", label, m, n, k, bias=False)


def _case(
    device: torch.device, dtype: torch.dtype, kernel: str, label: str, m: int, n: int, k: int, *, bias: bool
) -> Case:
    def build(seed: int) -> Instance:
        from server.kernels.gemv import gemv

        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

        x, weight, offset = normal(m, k), normal(n, k) * k**-0.5, normal(n) if bias else None
        function = gemv if kernel == "gemv" else F.linear
        return Instance(
            lambda: (function(x, weight, offset),),
            lambda: (F.linear(x.float(), weight.float(), None if offset is None else offset.float()),),
        )

    moved = dtype.itemsize * (n * k + m * (n + k))
    return Case(f"linear/{kernel}", f"{label} {m} x {n} x {k}", dtype, moved, 2 * m * n * k, build)


def _gated(device: torch.device, dtype: torch.dtype, label: str, m: int, n: int, k: int) -> Case:
    """One or two rows through the merged gate and up projection and the activation, in one launch."""

    def build(seed: int) -> Instance:
        from server.kernels.gemv import gated_gemv

        generator = torch.Generator(device=device).manual_seed(seed)
        x = torch.empty(m, k, dtype=dtype, device=device).normal_(generator=generator)
        weight = torch.empty(n, k, dtype=dtype, device=device).normal_(generator=generator) * k**-0.5

        def expected() -> tuple[torch.Tensor, ...]:
            gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
            return (F.silu(gate) * up,)

        return Instance(lambda: (gated_gemv(x, weight, None),), expected)

    moved = dtype.itemsize * (n * k + m * (k + n // 2))
    return Case("linear/gated_gemv", f"{label} {m} x {n} x {k}", dtype, moved, 2 * m * n * k, build)
