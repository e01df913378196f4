"""What the attention op needs to know about the step that is running.

A custom op can take tensors and plain values only, so the step's metadata and each layer's KV cache reach it through
this module-level context, set around one forward pass. The worker runs one forward at a time in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from server.attention.base import AttentionMetadata
    from server.layers.attention import Attention


@dataclass(slots=True)
class ForwardContext:
    """State of one forward pass."""

    attention_metadata: AttentionMetadata | None
    """None while profiling memory or warming up without a KV cache: attention then writes zeros."""
    layers: dict[str, Attention]
    """Attention layers of the model by name, e.g. `model.layers.3.self_attn.attn`."""
    cudagraph_mode: str = "none"
    """`none`, `piecewise` or `full`: which kind of graph this batch runs under."""
    num_tokens_padded: int = 0
    """Tokens of the batch after padding to a captured size; equals the real number without graphs."""
    positions: torch.Tensor | None = None
    """int64 (T,): positions of the tokens, at a fixed address under graphs; for attention that rotates its inputs."""


_current: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    if _current is None:
        raise RuntimeError("no forward context is set: run the model inside set_forward_context()")
    return _current


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    global _current
    before = _current
    _current = context
    try:
        yield
    finally:
        _current = before
