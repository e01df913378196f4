"""Every kernel and backend against fp32, on fresh random inputs and poisoned caches."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchctl.kernelbench.attention_cases import CHECK_LAYOUTS, Layout, check_batches, check_cases
from benchctl.kernelbench.block_cases import block_cases
from benchctl.kernelbench.case import Case, relative_error, tolerance
from benchctl.kernelbench.layer_cases import layer_cases
from benchctl.kernelbench.linear_cases import linear_cases
from benchctl.kernelbench.sampling_cases import sampling_cases
from benchctl.kernelbench.suite import BACKENDS
from server.attention.triton_attn import TritonAttentionBackend

HALVES = [torch.bfloat16, torch.float16]
ALL = [*HALVES, torch.float32]
# Every head size and grouping in bfloat16, one of each in the other precisions. FLASH_ATTN's decodes are TRITON_ATTN's
# unless native, and its other batches are those of native.
OTHERS = [(torch.float16, CHECK_LAYOUTS[1]), (torch.float32, CHECK_LAYOUTS[3])]
GRID = [
    (name, dtype, layout)
    for name in ("TRITON_ATTN", "FLASH_ATTN native")
    for dtype, layout in [*((torch.bfloat16, layout) for layout in CHECK_LAYOUTS), *OTHERS]
]
GRID.append(("FLASH_ATTN", torch.bfloat16, CHECK_LAYOUTS[4]))


def assert_close(cases: Iterable[Case]) -> None:
    """All cases within their tolerance; says every one that is not."""
    wrong = []
    for case in cases:
        instance = case.build(1)
        expected = instance.expected()
        error = relative_error(instance.run(), expected)
        if not error <= tolerance(case.dtype, interpreted=False):
            wrong.append(f"{case.kernel} {case.shape} {case.dtype}: error {error:.2e}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("name", "dtype", "layout"), GRID, ids=str)
def test_attention(name: str, dtype: torch.dtype, layout: Layout, device: torch.device) -> None:
    backend_class = BACKENDS[name]
    reason = backend_class.why_unavailable(layout.spec(device, dtype, 512))
    if reason is not None:
        pytest.skip(reason)
    cases = list(check_cases(name, backend_class, device, dtype, small=False, layouts=[layout]))
    assert len(cases) == len(list(check_batches(layout, small=False)))
    if backend_class is TritonAttentionBackend:
        # Triton compiles outside Python's lock for most of the time.
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda case: case.build(0).run(), cases))
    assert_close(cases)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_layers(dtype: torch.dtype, device: torch.device) -> None:
    assert_close(layer_cases(device, dtype, [1, 7, 300], small=False))
    assert_close(layer_cases(device, dtype, [1, 5], small=True))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_projections(dtype: torch.dtype, device: torch.device) -> None:
    assert_close(linear_cases(device, dtype, [1, 2, 5, 8], small=True))
    assert_close(linear_cases(device, dtype, [1, 2, 8], small=False))
    for small in (True, False):
        assert_close(block_cases(device, dtype, small=small))


def test_sampling(device: torch.device) -> None:
    assert_close(sampling_cases(device, [1, 33], small=True))
    assert_close(sampling_cases(device, [64], small=False))


def test_frequencies_are_the_softmax(device: torch.device) -> None:
    from server.kernels.sampling import sample

    draws, vocab = 200_000, 12
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)).to(device) * 2
    probabilities = (logits[0] / 0.7).softmax(-1)
    rows = logits.expand(draws, vocab).contiguous()
    tokens = sample(
        rows,
        torch.full((draws,), 0.7, device=device),
        torch.full((draws,), 1234, device=device),
        torch.arange(draws, device=device),
    )
    expected = probabilities * draws
    counts = torch.bincount(tokens, minlength=vocab).float()
    # Chi-square with 11 degrees of freedom; 31.3 is its 99.9th percentile, and the seed is fixed.
    assert ((counts - expected) ** 2 / expected).sum().item() < 31.3


def test_unaligned_tensors_take_the_ordinary_way(device: torch.device) -> None:
    from server.kernels.activation import silu_and_mul

    aligned = torch.randn(3, 512, device=device, dtype=torch.bfloat16)
    storage = torch.empty(3 * 512 + 1, device=device, dtype=torch.bfloat16)
    shifted = storage[1:].view(3, 512)
    shifted.copy_(aligned)
    wanted = silu_and_mul(aligned)
    assert torch.equal(silu_and_mul(shifted), wanted)
    assert torch.equal(silu_and_mul(aligned), wanted)
