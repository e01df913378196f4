"""Put the kernels in the place of the layers' plain torch (see `server.layers.kernel_layer`).

Eager mode gets all of them as plain Python functions: nothing traces the model, and a dispatch through torch's
operators would cost each launch 3 us more. Compiled mode gets the projections alone, as an operator: Inductor fuses
everything else into fewer kernels than these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from server.forward_context import get_forward_context
from server.kernels import linear_op as _linear_op  # noqa: F401 - registers torch.ops.benchserve.linear
from server.kernels.activation import silu_and_mul
from server.kernels.embedding import embedding
from server.kernels.gemv import MAX_ROWS, gemv, supports
from server.kernels.launch import WARM_UP_THREADS
from server.kernels.norm import add_rms_norm, rms_norm
from server.kernels.rotary import rotary
from server.layers.kernel_layer import KernelFactory, install_kernels
from server.layers.linear import Embedding, Linear
from server.layers.norm import RMSNorm
from server.models.decoder import SelfAttention

Forward = Callable[..., Any]


def install_eager_kernels(model: nn.Module) -> Counter[str]:
    """Replace every layer's forward by its kernel; returns how many of each kind. For models that are not compiled."""
    factories: dict[str, KernelFactory] = {
        "embedding": _embedding,
        "rms_norm": _rms_norm,
        "silu_and_mul": lambda layer: silu_and_mul,
        "linear": _linear,
    }
    installed = install_kernels(model, factories)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.forward = _self_attention(module)  # type: ignore[method-assign]
            installed["rotary"] += 1
    return installed


def install_compiled_kernels(model: nn.Module) -> Counter[str]:
    """Replace the projections by `torch.ops.benchserve.linear`; returns how many. For models that are compiled."""
    return install_kernels(model, {"linear": _linear_operator})


def _embedding(layer: Embedding) -> Forward:
    weight = layer.weight
    return lambda input_ids: embedding(input_ids, weight)


def _rms_norm(layer: RMSNorm) -> Forward:
    weight, eps = layer.weight, layer.eps

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return rms_norm(x, weight, eps)
        return add_rms_norm(x, residual, weight, eps)

    return forward


def _linear(layer: Linear) -> Forward | None:
    weight, bias = layer.weight, layer.bias
    if not supports(weight):
        return None

    def forward(x: torch.Tensor) -> torch.Tensor:
        if 0 < x.shape[0] <= MAX_ROWS and x.is_contiguous():
            return gemv(x, weight, bias)
        return F.linear(x, weight, bias)

    return forward


def _linear_operator(layer: Linear) -> Forward | None:
    weight, bias = layer.weight, layer.bias
    if not supports(weight):
        return None
    operator = torch.ops.benchserve.linear.default

    return lambda x: operator(x, weight, bias)


def _self_attention(layer: SelfAttention) -> Forward:
    """Attention with q/k norm, rotary embedding and cache write in one launch, and no operator around the backend."""
    attention, rotary_layer = layer.attn, layer.rotary
    heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    cos_sin, scale = rotary_layer.cos_sin_cache, attention.scale
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    eps = 0.0
    if layer.q_norm is not None and layer.k_norm is not None:
        norms, eps = (layer.q_norm.weight, layer.k_norm.weight), layer.q_norm.eps
    width = (heads + 2 * kv_heads) * head_dim

    def forward(positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        qkv = layer.qkv_proj(hidden)
        tokens = qkv.shape[0]
        output = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        metadata = get_forward_context().attention_metadata
        if metadata is None:
            output.zero_()
        else:
            cache, backend = attention.kv_cache, attention.backend
            if cache is None or backend is None:
                raise RuntimeError(f"{attention.layer_name}: no KV cache is bound")
            rotary(
                qkv, positions, cos_sin, heads, kv_heads, head_dim,
                norm_weights=norms, eps=eps, kv_cache=cache, slot_mapping=metadata.slot_mapping,
            )  # fmt: skip
            query = qkv.as_strided((tokens, heads, head_dim), (width, head_dim, 1))
            backend.forward(query, cache, metadata, scale, output)
        return layer.o_proj(output.view(tokens, heads * head_dim))

    return forward


@torch.inference_mode()
def warm_up_projections(model: nn.Module) -> None:
    """Compile the GEMV for every distinct projection of `model`: for one row, and for the several that share one."""
    distinct: dict[tuple[torch.Size, bool], Linear] = {}
    for layer in model.modules():
        if isinstance(layer, Linear) and supports(layer.weight):
            distinct.setdefault((layer.weight.shape, layer.bias is not None), layer)

    def run(task: tuple[Linear, int]) -> None:
        layer, rows = task
        layer(layer.weight.new_zeros(rows, layer.in_features))

    # Triton compiles outside of the interpreter's lock for the most part.
    with ThreadPoolExecutor(WARM_UP_THREADS, thread_name_prefix="projections") as pool:
        list(pool.map(run, [(layer, rows) for layer in distinct.values() for rows in (1, 2)]))
