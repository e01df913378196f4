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
"""Tokens beyond which a step keeps the GPU busy for longer than it takes to launch."""

# Mixed batches only (decode batches have full graphs): below about 256 tokens a step's time is that of reading the
# weights, so padding costs nothing, and every size costs as many graphs as the model has layers.
_COARSE_SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512)


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
) -> CaptureSizes:
    """Sizes for `mode`; `explicit` (`--cudagraph-capture-sizes`) replaces the standard ones.

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
    largest_mixed = min(LARGEST_GRAPH, token_budget)
    full: Sequence[int] = ()
    piecewise: Sequence[int] = ()
    if wants_full:
        full = standard_sizes(min(largest_decode, LARGEST_GRAPH)) if explicit is None else explicit
        full = [size for size in full if size <= largest_decode]
    if wants_piecewise and explicit is not None:
        piecewise = explicit
    elif wants_piecewise and wants_full:
        piecewise = [size for size in _COARSE_SIZES if size <= largest_mixed] or [largest_mixed]
    elif wants_piecewise:
        piecewise = standard_sizes(largest_mixed)
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
