"""Put the kernels in the place of the layers' plain torch (see `server.layers.kernel_layer`).

Eager mode gets all of them as plain Python functions: nothing traces the model, and a dispatch through torch's
operators would cost each launch 3 us more. Compiled mode gets the rotary kernel, which writes the cache as well, inside
the attention operator, and, where rows are short, what lies between two attention calls as two operators which hold the
norms (`server.kernels.block_op`). Where they are long it gets the projections, and the norms are Inductor's: on an H200
a step of one sequence of the 8B shape takes 3.97 ms with its norms and 4.03 ms with ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from server.forward_context import get_forward_context
from server.kernels import block_op
from server.kernels import norm_op as _norm_op  # noqa: F401 - registers the operators
from server.kernels.activation import silu_and_mul
from server.kernels.embedding import embedding
from server.kernels.gemv import config_for, gemv, rows_to_warm_up, supports
from server.kernels.launch import WARM_UP_THREADS
from server.kernels.linear_op import gated_linear, linear
from server.kernels.norm import add_rms_norm, rms_norm
from server.kernels.rotary import rotary
from server.layers.attention import RotateAndStore
from server.layers.kernel_layer import KernelFactory, install_kernels
from server.layers.linear import Embedding, Linear
from server.layers.norm import RMSNorm
from server.models.decoder import Decoder, DecoderLayer, FeedForward, SelfAttention

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
        elif isinstance(module, FeedForward) and supports(module.gate_up_proj.weight):
            module.forward = _feed_forward(module, gated_linear)  # type: ignore[method-assign]
            installed["gated_linear"] += 1
    return installed


def install_compiled_kernels(model: nn.Module, *, norms: bool = False) -> Counter[str]:
    """Replace what lies between projection and attention by the rotary kernel within the attention operator, and what
    lies between two attention calls by the operators of `block_op`, or, where those do not fit, the projections by
    `torch.ops.benchserve.linear` and `gated_linear`. With `norms` also the norms that are left, which Inductor
    otherwise fuses with their neighbours. Returns how many of each. For models that are compiled."""
    factories: dict[str, KernelFactory] = {"linear": _linear_operator}
    if norms:
        factories["rms_norm"] = _rms_norm_operator
    installed = install_kernels(model, factories)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attn.rotate_and_store = _rotate_and_store(module)
            module.forward = _compiled_self_attention(module)  # type: ignore[method-assign]
            installed["rotary"] += 1
        elif isinstance(module, FeedForward) and supports(module.gate_up_proj.weight):
            module.forward = _feed_forward(module, torch.ops.benchserve.gated_linear.default)  # type: ignore[method-assign]
            installed["gated_linear"] += 1
    for module in model.modules():
        if isinstance(module, Decoder) and block_op.can_run(module):
            module.run = block_op.run
            installed["block"] += len(module.layers)
    return installed


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


def _rms_norm_operator(layer: RMSNorm) -> Forward:
    weight, eps = layer.weight, layer.eps
    norm, add_norm = torch.ops.benchserve.rms_norm.default, torch.ops.benchserve.add_rms_norm.default

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return norm(x, weight, eps)
        return add_norm(x, residual, weight, eps)

    return forward


def _linear(layer: Linear) -> Forward | None:
    weight, bias = layer.weight, layer.bias
    if not supports(weight):
        return None
    n, k = weight.shape

    def forward(x: torch.Tensor) -> torch.Tensor:
        config = config_for(x.shape[0], n, k)
        if config is None or not x.is_contiguous():
            return F.linear(x, weight, bias)
        return gemv(x, weight, bias, config=config)

    return forward


def _feed_forward(layer: FeedForward, gated: Forward) -> Forward:
    """The gated feed-forward network with its first projection and its activation in one, as `gated` has it."""
    weight, bias, down_proj = layer.gate_up_proj.weight, layer.gate_up_proj.bias, layer.down_proj
    return lambda hidden: down_proj(gated(hidden, weight, bias))


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
    norms, eps = _norms(layer)
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


def _compiled_self_attention(layer: SelfAttention) -> Forward:
    """Attention over the parts of the merged projection as they are: its operator does the rest."""
    sizes = (layer.q_size, layer.kv_size, layer.kv_size)

    def forward(positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return layer.o_proj(layer.attn(*layer.qkv_proj(hidden).split(sizes, dim=-1)))

    return forward


def _rotate_and_store(layer: SelfAttention) -> RotateAndStore:
    """See `server.layers.attention.RotateAndStore`: one launch on parts of one merged projection."""
    attention, cos_sin = layer.attn, layer.rotary.cos_sin_cache
    heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    norms, eps = _norms(layer)
    width = (heads + 2 * kv_heads) * head_dim

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if positions is None:
            raise RuntimeError("the forward context holds no positions")
        size = query.element_size()
        key_at = query.data_ptr() + heads * head_dim * size
        merged = key.data_ptr() == key_at and value.data_ptr() == key_at + kv_heads * head_dim * size
        if merged and (query.shape[0] == 1 or query.stride(0) == width):
            # `query` stands for the merged projection, which begins where it does.
            rows = query
        else:
            rows = torch.cat((query.flatten(1), key.flatten(1), value.flatten(1)), dim=1)
        rotary(
            rows, positions, cos_sin, heads, kv_heads, head_dim,
            norm_weights=norms, eps=eps, kv_cache=kv_cache, slot_mapping=slot_mapping,
        )  # fmt: skip
        if rows is not query:
            query.copy_(rows[:, : heads * head_dim].view(query.shape))

    return run


def _norms(layer: SelfAttention) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, float]:
    """Weights of the q and k norm, and their epsilon."""
    if layer.q_norm is None or layer.k_norm is None:
        return None, 0.0
    return (layer.q_norm.weight, layer.k_norm.weight), layer.q_norm.eps


@torch.inference_mode()
def warm_up_layers(model: nn.Module, *, norms: bool) -> None:
    """Compile the kernels of every distinct projection of `model`, and of its activation; with `norms` those of its
    norms, too."""
    feed_forwards = [module for module in model.modules() if isinstance(module, FeedForward)]
    gated = {module.gate_up_proj for module in feed_forwards}
    distinct: dict[tuple[torch.Size, bool, bool], tuple[Linear, Forward]] = {}
    for layer in model.modules():
        if isinstance(layer, Linear) and supports(layer.weight):
            key = (layer.weight.shape, layer.bias is not None, layer in gated)
            distinct.setdefault(key, (layer, gated_linear if layer in gated else linear))
    calls: list[Callable[[], Any]] = [
        partial(function, layer.weight.new_zeros(rows, layer.in_features), layer.weight, layer.bias)
        for layer, function in distinct.values()
        for rows in rows_to_warm_up(*layer.weight.shape)
    ]
    # What follows a gated projection of more rows.
    widths = {layer.out_features: layer.weight for layer, function in distinct.values() if function is gated_linear}
    calls += [partial(silu_and_mul, weight.new_zeros(1, width)) for width, weight in widths.items()]
    decoder = next(module for module in model.modules() if isinstance(module, Decoder))
    if decoder.run is not None:
        calls += block_op.warm_up_calls(decoder)
    if norms or decoder.run is not None:
        # Norms of heads are part of the rotary kernel; the others are all of one size.
        decoder_layer = next(module for module in model.modules() if isinstance(module, DecoderLayer))
        weight, eps = decoder_layer.input_layernorm.weight, decoder_layer.input_layernorm.eps
        hidden, residual = torch.zeros_like(weight)[None], torch.zeros_like(weight)[None]
        calls += [partial(rms_norm, hidden, weight, eps), partial(add_rms_norm, hidden, residual, weight, eps)]
    # Compiling holds the lock of the interpreter; the threads are for what waits, for builders and for the disk.
    with ThreadPoolExecutor(WARM_UP_THREADS, thread_name_prefix="kernels") as pool:
        list(pool.map(lambda call: call(), calls))
