"""Compiled models with the kernels in place, on CPU with plain torch in the kernels' stead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchctl.kernelbench import reference
from server.attention import select_backend
from server.attention.base import AttentionSpec
from server.attention.warm_up import synthetic_batch
from server.compilation.capture import capture
from server.compilation.executor import PlanExecutor
from server.compilation.split import split
from server.forward_context import ForwardContext, set_forward_context
from server.kernels import install
from server.layers import attention as attention_layer
from server.models.config import ModelConfig
from server.models.decoder import CausalLM, build_model

CPU = torch.device("cpu")


def make_model(*, qk_norm: bool, qkv_bias: bool) -> CausalLM:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=97,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=96,
        max_position_embeddings=128,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )
    torch.manual_seed(7)
    model = build_model(config, device=CPU, dtype=torch.bfloat16, max_positions=128)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


def plain_rotary(qkv, positions, cos_sin, heads, kv_heads, dim, *, norm_weights, eps, kv_cache, slot_mapping) -> None:  # type: ignore[no-untyped-def]
    """What the kernel does, reached as the kernel reaches it: by the address of the first row."""
    assert qkv.dim() == 3  # the query itself: parts of one projection are never put together again
    width = (heads + 2 * kv_heads) * dim
    rows = torch.as_strided(qkv, (qkv.shape[0], heads + 2 * kv_heads, dim), (width, dim, 1))
    q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
    if norm_weights is not None:
        q = reference.rms_norm(q, norm_weights[0], eps).to(qkv.dtype)
        k = reference.rms_norm(k, norm_weights[1], eps).to(qkv.dtype)
    rows[:, :heads] = reference.rotate(q, cos_sin, positions).to(qkv.dtype)
    real = slot_mapping >= 0
    flat = kv_cache.flatten(1, 2)
    flat[0, slot_mapping[real]] = reference.rotate(k, cos_sin, positions).to(qkv.dtype)[real]
    flat[1, slot_mapping[real]] = v[real]


@pytest.mark.parametrize(
    ("qk_norm", "qkv_bias", "inductor"), [(False, True, False), (True, False, False), (True, True, True)]
)
def test_the_attention_operator_rotates_and_stores(
    qk_norm: bool, qkv_bias: bool, inductor: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "rotary", plain_rotary)
    spec = AttentionSpec(CPU, torch.bfloat16, 4, 2, 32, 16, max_num_seqs=4)
    backend, _ = select_backend("TORCH_SDPA", spec)
    batch = synthetic_batch(spec, [6, 1, 0], [22, 9, 0])
    ids = torch.arange(8) * 13 % 97
    positions = torch.tensor([16, 17, 18, 19, 20, 21, 8, 0])
    outputs, caches = [], []
    for with_kernels in (False, True):
        model = make_model(qk_norm=qk_norm, qkv_bias=qkv_bias)
        layers = model.attention_layers()
        for layer in layers.values():
            layer.kv_cache, layer.backend = batch.kv_cache.clone(), backend
        if with_kernels:
            assert install.install_compiled_kernels(model)["rotary"] == 2
        with torch.inference_mode(), set_forward_context(ForwardContext(batch.metadata, layers, positions=positions)):
            if with_kernels:
                graph = split(capture(model.model, 8, CPU))
                pieces = [
                    torch._inductor.standalone_compile(
                        piece,
                        [n.meta["example_value"] for n in piece.graph.nodes if n.op == "placeholder"],
                        dynamic_shapes="from_graph",
                    )
                    if inductor
                    else piece
                    for piece in graph.pieces
                ]
                weights = dict([*model.model.named_parameters(), *model.model.named_buffers()])
                forward = PlanExecutor(graph.plan, pieces, weights, attention_layer._attention)
            else:
                forward = model.model
            outputs.append(forward(ids, positions))
        caches.append(next(reversed(layers.values())).kv_cache)
    torch.testing.assert_close(outputs[1][:7].float(), outputs[0][:7].float(), atol=0.06, rtol=0.05)
    torch.testing.assert_close(caches[1].float(), caches[0].float(), atol=0.06, rtol=0.05)
