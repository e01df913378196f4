"""The attention layer and its custom op `torch.ops.benchserve.attention`.

The op is opaque to Dynamo and Inductor and the same in both modes. It mutates `output` and takes everything that
changes from step to step (metadata, KV cache, backend) from the forward context.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from server.attention.base import AttentionBackend
from server.forward_context import get_forward_context

RotateAndStore = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], None
]
"""`(query, key, value, positions, kv_cache, slot_mapping)`: normalises and rotates query in place, and stores keys,
treated likewise, and values in the cache. Key and value are left in any state."""


class Attention(nn.Module):
    """Causal attention over the paged KV cache, grouped-query where `num_heads > num_kv_heads`.

    `kv_cache` and `backend` are set once the number of blocks is known (`server.worker.kv_cache`).
    """

    def __init__(self, layer_name: str, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.kv_cache: torch.Tensor | None = None
        """This layer's cache, in the shape that the backend's `kv_cache_shape` gives."""
        self.backend: AttentionBackend | None = None
        self.rotate_and_store: RotateAndStore | None = None
        """A kernel that does the work between projection and attention; None: the model has rotated queries and keys,
        and the backend stores keys and values."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (T, H * D), k and v (T, K * D) -> (T, H * D)."""
        output = torch.empty_like(q)
        torch.ops.benchserve.attention(
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_kv_heads, self.head_dim)),
            v.unflatten(-1, (self.num_kv_heads, self.head_dim)),
            output.unflatten(-1, (self.num_heads, self.head_dim)),
            self.layer_name,
        )
        return output


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer_name: str
) -> None:
    context = get_forward_context()
    metadata = context.attention_metadata
    if metadata is None:
        output.zero_()
        return
    layer = context.layers[layer_name]
    kv_cache, backend = layer.kv_cache, layer.backend
    if kv_cache is None or backend is None:
        raise RuntimeError(f"{layer_name}: no KV cache is bound")
    if layer.rotate_and_store is not None:
        layer.rotate_and_store(query, key, value, context.positions, kv_cache, metadata.slot_mapping)
    else:
        backend.write_kv(key, value, kv_cache, metadata.slot_mapping)
    backend.forward(query, kv_cache, metadata, layer.scale, output)


def _attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer_name: str
) -> None:
    """Shapes only: nothing is returned."""


# A Library definition costs a call 2.8 us against 24 us through `torch.library.custom_op`.
_library = torch.library.Library("benchserve", "FRAGMENT")
_library.define("attention(Tensor query, Tensor key, Tensor value, Tensor(a!) output, str layer_name) -> ()")
for _key in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _key)
torch.library.register_fake("benchserve::attention", _attention_fake, lib=_library)
