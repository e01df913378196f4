"""Which CUDA Graph a batch runs under: pure arithmetic on sizes, no torch.

FULL: one graph of the whole step for a pure decode batch (one token per sequence), attention included. PIECEWISE: the
pieces between attention calls are graphs, attention runs eagerly, so any mix of prompts and decodes fits. Otherwise
plain: the compiled pieces are launched one by one. A batch is padded to the next captured size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from server.config import CudaGraphMode
from server.errors import UserError

LARGEST_GRAPH = 512
"""Largest decode graph, and the largest piecewise one of a model whose layers keep the GPU busy for longer than they
take to launch from there on."""

LAYER_LAUNCH_S = 0.5e-3
"""What it takes the host to launch the compiled pieces of a layer one by one, beside the attention between them.
Measured beside one H200 (Qwen3-0.6B and the 8B shape: 13 to 20 ms a step)."""
PRODUCT_FLOPS = 600e12
"""FLOP/s of products that large on the same GPU. A slower GPU is busy for longer, and has a few graphs too many."""

# Mixed batches only (decode batches have full graphs): below about 256 tokens a step's time is that of reading the
# weights, so padding costs nothing, and every size costs as many graphs as the model has layers. Above, padding costs
# an eighth at most.
_COARSE_SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512)
_STEPS_PER_DOUBLING = 8


@dataclass(slots=True, frozen=True)
class BatchDescriptor:
    """The shape under which a batch runs: its own, or that of the graph that serves it."""

    num_tokens: int
    num_seqs: int
    cudagraph_mode: str = "none"
    """`none`, `piecewise` or `full`."""


def standard_sizes(limit: int) -> list[int]:
    """vLLM's sizes up to `limit`, which is one of them: padding wastes at most 7 rows of 8 (15 of 16 above 256)."""
    sizes = [s for s in (1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_GRAPH + 1, 16)) if s <= limit]
    if 0 < limit <= LARGEST_GRAPH and limit not in sizes:
        sizes.append(limit)
    return sizes


def largest_piecewise(layer_parameters: int) -> int:
    """Tokens up to which a model with so many parameters a layer waits for the host if its pieces are launched one by
    one: from there on the layer's products, 2 FLOP a parameter and token, take the GPU longer."""
    return max(LARGEST_GRAPH, int(LAYER_LAUNCH_S * PRODUCT_FLOPS / (2 * max(layer_parameters, 1))))


def _coarse_sizes(limit: int) -> list[int]:
    sizes = [size for size in _COARSE_SIZES if size <= limit]
    start = LARGEST_GRAPH
    while start < limit:
        step = start // _STEPS_PER_DOUBLING
        sizes.extend(size for size in range(start + step, 2 * start + 1, step) if size <= limit)
        start *= 2
    return sizes or [limit]


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """Batch sizes to capture, ascending."""

    full: tuple[int, ...] = ()
    """Sequences, of one token each."""
    piecewise: tuple[int, ...] = ()
    """Tokens."""


def capture_sizes(
    mode: CudaGraphMode,
    explicit: Sequence[int] | None,
    *,
    max_num_seqs: int,
    token_budget: int,
    full_supported: bool,
    layer_parameters: int,
) -> CaptureSizes:
    """Sizes for `mode`; `explicit` (`--cudagraph-capture-sizes`) replaces the standard ones. `layer_parameters`: the
    parameters of one layer of the model, see `largest_piecewise`.

    Where the attention backend cannot be captured (`full_supported` False), `full` gives no graphs and
    `full_and_piecewise` gives piecewise ones at all sizes. UserError for a size that no batch can have.
    """
    if explicit is not None:
        for size in explicit:
            if not 1 <= size <= token_budget:
                raise UserError(
                    f"--cudagraph-capture-sizes: {size} is not between 1 and the token budget {token_budget}"
                )
    wants_full = mode in ("full", "full_and_piecewise") and full_supported
    wants_piecewise = mode in ("piecewise", "full_and_piecewise")
    largest_decode = min(max_num_seqs, token_budget)
    largest_mixed = min(largest_piecewise(layer_parameters), token_budget)
    full: Sequence[int] = ()
    piecewise: Sequence[int] = ()
    if wants_full:
        full = standard_sizes(min(largest_decode, LARGEST_GRAPH)) if explicit is None else explicit
        full = [size for size in full if size <= largest_decode]
    if wants_piecewise and explicit is not None:
        piecewise = explicit
    elif wants_piecewise and wants_full:
        piecewise = _coarse_sizes(largest_mixed)
    elif wants_piecewise:
        piecewise = [*standard_sizes(min(LARGEST_GRAPH, largest_mixed)), *_coarse_sizes(largest_mixed)]
    return CaptureSizes(tuple(sorted(set(full))), tuple(sorted(set(piecewise))))


class Dispatcher:
    """Chooses the graph of a batch among those captured."""

    def __init__(self, sizes: CaptureSizes) -> None:
        self.sizes = sizes

    def dispatch(self, num_tokens: int, num_seqs: int, max_query_len: int) -> BatchDescriptor:
        """FULL if it is a pure decode batch that fits, else PIECEWISE if its tokens fit, else plain."""
        if max_query_len == 1 and num_tokens == num_seqs:
            size = _next_size(self.sizes.full, num_seqs)
            if size is not None:
                return BatchDescriptor(size, size, "full")
        size = _next_size(self.sizes.piecewise, num_tokens)
        if size is not None:
            return BatchDescriptor(size, num_seqs, "piecewise")
        return BatchDescriptor(num_tokens, num_seqs)


def _next_size(sizes: tuple[int, ...], count: int) -> int | None:
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
