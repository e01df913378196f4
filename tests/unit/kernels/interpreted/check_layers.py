"""The kernels for eager mode and the GEMV, against fp32."""

from __future__ import annotations

import pytest
import torch

from benchctl.kernelbench.case import relative_error, tolerance
from benchctl.kernelbench.layer_cases import layer_cases
from benchctl.kernelbench.linear_cases import linear_cases
from server.kernels.gemv import gated_gemv, gemv
from server.kernels.norm import add_rms_norm, rms_norm
from server.kernels.norm_gemv import add_gemv, fits, norm_gated_gemv, norm_gemv

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_kernels(dtype: torch.dtype) -> None:
    for case in layer_cases(CPU, dtype, [1, 8], small=True):
        instance = case.build(5)
        expected = instance.expected()
        assert relative_error(instance.run(), expected) < tolerance(dtype, interpreted=True), case


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gemv(dtype: torch.dtype) -> None:
    for case in linear_cases(CPU, dtype, [1, 2, 8], small=True):
        instance = case.build(5)
        expected = instance.expected()
        assert relative_error(instance.run(), expected) < tolerance(dtype, interpreted=True), case


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("k", [1024, 1096, 2568])
def test_gated_gemv_is_projection_and_activation(k: int, with_bias: bool, rows: int) -> None:
    x, weight = torch.randn(rows, k).half(), (torch.randn(2 * 21, k) * k**-0.5).half()
    bias = torch.randn(2 * 21).half() if with_bias else None
    gate, up = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(
        2, -1
    )
    wanted = torch.nn.functional.silu(gate) * up
    assert relative_error((gated_gemv(x, weight, bias),), (wanted,)) < tolerance(torch.float16, interpreted=True)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(5, 4096), (3, 7 * 1024), (7, 1032), (2, 8)])
def test_each_row_of_x_gets_its_own_products(n: int, k: int, rows: int) -> None:
    """All that a row of the weight can be made of: blocks that are read ahead, turns of the loop, a tail."""
    x, weight, bias = torch.randn(rows, k).half(), (torch.randn(n, k) * k**-0.5).half(), torch.randn(n).half()
    out = gemv(x, weight, bias)
    for row in range(rows):
        wanted = weight.float() @ x[row].float() + bias.float()
        assert relative_error((out[row],), (wanted,)) < tolerance(torch.float16, interpreted=True)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("size", "k"), [(1024, 2048), (576, 1536), (64, 15 * 256), (2048, 8)])
def test_norms_within_projections_round_like_norms_between_them(size: int, k: int, with_bias: bool) -> None:
    def half(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * scale).half()

    x, first, residual, norm = half(1, k), half(size, k, scale=k**-0.5), half(1, size), half(size)
    bias = half(size) if with_bias else None
    total = add_gemv(x, first, bias, residual)
    torch.testing.assert_close(total, gemv(x, first, bias) + residual, rtol=2e-3, atol=2e-3)

    normal = rms_norm(total, norm, 1e-5)
    project, bias = half(6, size, scale=size**-0.5), half(6) if with_bias else None
    torch.testing.assert_close(
        norm_gemv(total, norm, 1e-5, project, bias), gemv(normal, project, bias), rtol=2e-3, atol=2e-3
    )
    torch.testing.assert_close(
        norm_gated_gemv(total, norm, 1e-5, project, bias), gated_gemv(normal, project, bias), rtol=2e-3, atol=2e-3
    )


def test_norms_go_into_projections_of_short_rows_in_half_precision() -> None:
    def half(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.float16)

    assert fits(half(576, 1536), half(576), half(6, 576))
    assert not fits(half(576, 1536).float(), half(576), half(6, 576))
    assert not fits(half(1032, 64), half(1032), half(6, 1032)), "129 blocks of 8"
    assert not fits(half(4096, 64), half(4096), half(6, 4096)), "too long"


def test_norm_of_heads_inside_a_wider_row() -> None:
    merged, weight = torch.randn(3, 5 * 32), torch.randn(32)
    heads = merged[:, : 2 * 32].unflatten(1, (2, 32))
    torch.testing.assert_close(rms_norm(heads, weight, 1e-6), rms_norm(heads.contiguous(), weight, 1e-6))


def test_empty_batches() -> None:
    empty, weight = torch.empty(0, 16), torch.ones(16)
    assert rms_norm(empty, weight, 1e-6).shape == (0, 16)
    assert add_rms_norm(empty, empty.clone(), weight, 1e-6)[0].shape == (0, 16)
