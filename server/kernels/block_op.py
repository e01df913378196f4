"""`torch.ops.benchserve.project_norm_gated` and `project_norm_project`: what lies between two attention calls, as two
operators: a projection, the norm of it and the residual stream, and the next projection.

Opaque to Dynamo and Inductor, so that a compiled piece keeps the choice of kernels until it runs, which is when a CUDA
Graph of a given size is captured: the graph of one token holds the norm within the projections (`norm_gemv`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from server.kernels.linear_op import gated_linear, linear
from server.kernels.norm import add_rms_norm
from server.kernels.norm_gemv import add_gemv, fits, norm_gated_gemv, norm_gemv
from server.models.decoder import Decoder, DecoderLayer

Pair = tuple[torch.Tensor, torch.Tensor]


def project_norm_gated(
    x: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    second: torch.Tensor,
    second_bias: torch.Tensor | None,
) -> Pair:
    """`total = residual + x @ first.T + first_bias` and `silu(gate) * up` of the merged projection of its norm.

    x (T, K), first (N, K), residual (T, N), norm (N,), second (2M, N) -> (T, M) and the total (T, N). CUDA tensors for
    which `norm_gemv.fits` holds.
    """
    if x.shape[0] == 1:
        total = add_gemv(x, first, first_bias, residual)
        return norm_gated_gemv(total, norm, eps, second, second_bias), total
    x, total = add_rms_norm(linear(x, first, first_bias), residual, norm, eps, in_place=False)
    return gated_linear(x, second, second_bias), total


def project_norm_project(
    x: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    second: torch.Tensor,
    second_bias: torch.Tensor | None,
) -> Pair:
    """Like `project_norm_gated` with a plain second projection: second (M, N), results (T, M) and (T, N)."""
    if x.shape[0] == 1:
        total = add_gemv(x, first, first_bias, residual)
        return norm_gemv(total, norm, eps, second, second_bias), total
    x, total = add_rms_norm(linear(x, first, first_bias), residual, norm, eps, in_place=False)
    return linear(x, second, second_bias), total


def _project_norm_gated_cpu(
    x: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    second: torch.Tensor,
    second_bias: torch.Tensor | None,
) -> Pair:
    both, total = _project_norm_project_cpu(x, first, first_bias, residual, norm, eps, second, second_bias)
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up, total


def _project_norm_project_cpu(
    x: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    second: torch.Tensor,
    second_bias: torch.Tensor | None,
) -> Pair:
    total = residual + F.linear(x, first, first_bias)
    return F.linear(F.rms_norm(total, norm.shape, norm, eps), second, second_bias), total


def _fake(
    x: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    second: torch.Tensor,
    second_bias: torch.Tensor | None,
) -> Pair:
    return x.new_empty((x.shape[0], second.shape[0])), torch.empty_like(residual)


def _fake_gated(
    x: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    second: torch.Tensor,
    second_bias: torch.Tensor | None,
) -> Pair:
    return x.new_empty((x.shape[0], second.shape[0] // 2)), torch.empty_like(residual)


_SIGNATURE = (
    "(Tensor x, Tensor first, Tensor? first_bias, Tensor residual, Tensor norm, float eps, Tensor second, "
    "Tensor? second_bias) -> (Tensor, Tensor)"
)
_library = torch.library.Library("benchserve", "FRAGMENT")
for _name, _cuda, _cpu, _meta in (
    ("project_norm_gated", project_norm_gated, _project_norm_gated_cpu, _fake_gated),
    ("project_norm_project", project_norm_project, _project_norm_project_cpu, _fake),
):
    _library.define(_name + _SIGNATURE)
    _library.impl(_name, _cuda, "CUDA")
    _library.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"benchserve::{_name}", _meta, lib=_library)


def _layers(decoder: Decoder) -> list[DecoderLayer]:
    return list(decoder.layers)  # type: ignore[arg-type]


def can_run(decoder: Decoder) -> bool:
    """Whether `run` can compute this decoder: half precision and sizes that `norm_gemv` admits in every layer."""
    layers = _layers(decoder)
    inner = (
        fits(layer.self_attn.o_proj.weight, layer.post_attention_layernorm.weight, layer.mlp.gate_up_proj.weight)
        for layer in layers
    )
    outer = (
        fits(layer.mlp.down_proj.weight, following.input_layernorm.weight, following.self_attn.qkv_proj.weight)
        for layer, following in pairwise(layers)
    )
    return all(inner) and all(outer)


def warm_up_calls(decoder: Decoder) -> list[Callable[[], object]]:
    """Calls that compile the kernels of one row; those of more are `linear`'s, `gated_linear`'s and the norms' own."""
    layer = _layers(decoder)[0]
    attention, mlp, eps = layer.self_attn, layer.mlp, layer.input_layernorm.eps
    o, down, gate_up, qkv = attention.o_proj, mlp.down_proj, mlp.gate_up_proj, attention.qkv_proj
    norm = layer.input_layernorm.weight
    residual = torch.zeros_like(norm)[None]
    return [
        *(
            partial(add_gemv, last.weight.new_zeros(1, last.in_features), last.weight, last.bias, residual)
            for last in (o, down)
        ),
        partial(norm_gated_gemv, residual, norm, eps, gate_up.weight, gate_up.bias),
        partial(norm_gemv, residual, norm, eps, qkv.weight, qkv.bias),
    ]


def run(decoder: Decoder, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`Decoder.forward` by the operators. Attention must rotate and store by itself (`Attention.rotate_and_store`)."""
    residual: torch.Tensor = decoder.embed_tokens(input_ids)
    layers = _layers(decoder)
    qkv = layers[0].self_attn.qkv_proj(layers[0].input_layernorm(residual))
    for number, layer in enumerate(layers):
        attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
        sizes = (attention.q_size, attention.kv_size, attention.kv_size)
        hidden = attention.attn(*qkv.split(sizes, dim=-1))
        gated, residual = torch.ops.benchserve.project_norm_gated.default(
            hidden, attention.o_proj.weight, attention.o_proj.bias, residual, norm.weight, norm.eps,
            mlp.gate_up_proj.weight, mlp.gate_up_proj.bias,
        )  # fmt: skip
        if number + 1 < len(layers):
            following = layers[number + 1]
            norm, projection = following.input_layernorm, following.self_attn.qkv_proj
            qkv, residual = torch.ops.benchserve.project_norm_project.default(
                gated, mlp.down_proj.weight, mlp.down_proj.bias, residual, norm.weight, norm.eps,
                projection.weight, projection.bias,
            )  # fmt: skip
    hidden, _ = decoder.norm(layers[-1].mlp.down_proj(gated), residual)
    return hidden
