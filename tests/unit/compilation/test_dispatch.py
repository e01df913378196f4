"""Which CUDA Graph serves a batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.compilation.dispatch import (
    LARGEST_GRAPH,
    BatchDescriptor,
    CaptureSizes,
    Dispatcher,
    capture_sizes,
    standard_sizes,
)
from server.config import CudaGraphMode
from server.errors import UserError

LARGE_LAYER = 10**9


def sizes_for(
    mode: CudaGraphMode, *, seqs: int = 256, budget: int = 8192, full: bool = True, layer: int = LARGE_LAYER
) -> CaptureSizes:
    return capture_sizes(
        mode, None, max_num_seqs=seqs, token_budget=budget, full_supported=full, layer_parameters=layer
    )


def test_standard_sizes_are_those_of_the_design() -> None:
    assert standard_sizes(512) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert standard_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert standard_sizes(1) == [1]


@pytest.mark.parametrize(
    ("mode", "full_supported", "has_full", "has_piecewise"),
    [
        ("none", True, False, False),
        ("piecewise", True, False, True),
        ("full", True, True, False),
        ("full", False, False, False),
        ("full_and_piecewise", True, True, True),
        ("full_and_piecewise", False, False, True),
    ],
)
def test_modes(mode: CudaGraphMode, full_supported: bool, has_full: bool, has_piecewise: bool) -> None:
    sizes = sizes_for(mode, full=full_supported)
    assert (bool(sizes.full), bool(sizes.piecewise)) == (has_full, has_piecewise)
    if has_full:
        assert sizes.full[-1] == 256
    if has_piecewise:
        assert sizes.piecewise[-1] == LARGEST_GRAPH


def test_limits_and_explicit_sizes() -> None:
    assert sizes_for("full_and_piecewise", seqs=5, budget=6) == CaptureSizes((1, 2, 4, 5), (6,))
    assert sizes_for("full", seqs=1000).full[-1] == LARGEST_GRAPH
    limits: dict[str, Any] = {
        "max_num_seqs": 16, "token_budget": 128, "full_supported": True, "layer_parameters": LARGE_LAYER
    }  # fmt: skip
    sizes = capture_sizes("full_and_piecewise", (8, 2, 64, 2), **limits)
    assert sizes == CaptureSizes((2, 8), (2, 8, 64))
    for wrong in (0, 129):
        with pytest.raises(UserError, match="not between 1 and the token budget 128"):
            capture_sizes("full", (wrong,), **limits)


def test_small_layers_have_graphs_as_long_as_the_host_takes_longer_than_the_gpu() -> None:
    for layer, largest in ((218_112_000, 640), (60_821_504, 2304), (15_731_456, 8192), (1, 8192), (10**10, 512)):
        for mode in ("piecewise", "full_and_piecewise"):
            sizes = sizes_for(mode, layer=layer)  # type: ignore[arg-type]
            assert sizes.piecewise[-1] == largest, (layer, mode)
            assert max(sizes.full, default=0) <= 256
            coarse = [size for size in sizes.piecewise if size >= LARGEST_GRAPH]
            assert all(after <= before * 1.125 for before, after in itertools.pairwise(coarse))
    assert sizes_for("full_and_piecewise", budget=600, layer=1).piecewise[-1] == 576


@given(
    num_seqs=st.integers(1, 300),
    extra=st.integers(0, 900),
    mode=st.sampled_from(["none", "piecewise", "full", "full_and_piecewise"]),
)
def test_a_batch_is_padded_to_the_least_size_that_holds_it(num_seqs: int, extra: int, mode: CudaGraphMode) -> None:
    sizes = sizes_for(mode)
    num_tokens = num_seqs + extra
    chosen = Dispatcher(sizes).dispatch(num_tokens, num_seqs, max_query_len=1 if extra == 0 else 1 + extra)
    assert chosen.num_tokens >= num_tokens
    assert chosen.num_seqs >= num_seqs
    if chosen.cudagraph_mode == "full":
        assert extra == 0
        assert chosen.num_tokens == chosen.num_seqs == min(s for s in sizes.full if s >= num_seqs)
    elif chosen.cudagraph_mode == "piecewise":
        assert extra > 0 or num_seqs > max(sizes.full, default=0)
        assert chosen == BatchDescriptor(min(s for s in sizes.piecewise if s >= num_tokens), num_seqs, "piecewise")
    else:
        assert chosen == BatchDescriptor(num_tokens, num_seqs)
        assert num_tokens > max(sizes.piecewise, default=0)


def test_one_long_query_is_no_decode_batch() -> None:
    """Two sequences with one and three tokens are as many tokens as four decodes."""
    dispatcher = Dispatcher(sizes_for("full_and_piecewise"))
    assert dispatcher.dispatch(4, 2, max_query_len=3).cudagraph_mode == "piecewise"
    assert dispatcher.dispatch(4, 4, max_query_len=1).cudagraph_mode == "full"
