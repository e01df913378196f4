"""Layers against their formulas, the kernel seam, and the attention op as Dynamo sees it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from server.forward_context import ForwardContext, set_forward_context
from server.layers.activation import SiluAndMul
from server.layers.attention import Attention
from server.layers.kernel_layer import install_kernels
from server.layers.linear import Linear
from server.layers.norm import RMSNorm
from server.layers.rotary import RotaryEmbedding
from server.models.config import RopeConfig
from server.models.decoder import build_model
from server.models.loading import fill_dummy_weights
from server.models.registry import PRESETS


def test_rms_norm_with_and_without_residual() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(16, 1e-5)
    norm.weight.copy_(torch.randn(16))
    x, residual = torch.randn(2, 5, 16)
    total = x + residual
    expected = total / (total.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(total).double(), expected)
    normed, kept = norm(x, residual)
    torch.testing.assert_close(normed.double(), expected)
    torch.testing.assert_close(kept, total, atol=0, rtol=0)


def test_rotary_turns_pairs_by_their_angles() -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=100.0), head_dim=4, max_positions=50)
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    turned, _ = rotary(torch.tensor([7]), q, q)
    expected = [0.0] * 4
    for pair, frequency in enumerate((1.0, 0.1)):
        c, s = math.cos(7 * frequency), math.sin(7 * frequency)
        a, b = q[0, pair].item(), q[0, pair + 2].item()
        expected[pair], expected[pair + 2] = a * c - b * s, b * c + a * s
    torch.testing.assert_close(turned[0], torch.tensor(expected))


def test_rotary_keeps_precision_far_out_in_bfloat16() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rotary = RotaryEmbedding(RopeConfig(theta=500000.0), head_dim=8, max_positions=100_001)
    finally:
        torch.set_default_dtype(before)
    assert rotary.cos_sin_cache.dtype == torch.float32
    frequencies = 500000.0 ** -(torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(
        rotary.cos_sin_cache[100_000, :4].double(), (100_000 * frequencies).cos(), atol=5e-3, rtol=0
    )
    q, _ = rotary(torch.tensor([3]), torch.ones(1, 16, dtype=torch.bfloat16), torch.ones(1, 8, dtype=torch.bfloat16))
    assert (q.dtype, q.shape) == (torch.bfloat16, (1, 16))


def test_silu_and_mul() -> None:
    gate, up = torch.randn(2, 3, 5)
    merged = SiluAndMul()(torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(merged, gate / (1 + (-gate).exp()) * up)


def test_merged_parts_must_add_up() -> None:
    with pytest.raises(ValueError, match="do not add up to 5 rows"):
        Linear(2, 5, parts={"a": 2, "b": 2})


def test_installed_kernels_replace_forward_once() -> None:
    model = nn.Sequential(RMSNorm(4, 1e-5), SiluAndMul(), RMSNorm(2, 1e-5))
    native = model[2].forward
    installed = install_kernels(
        model, {"rms_norm": lambda layer: (lambda x: x * 0) if layer.weight.shape[0] == 4 else None}
    )
    assert installed == {"rms_norm": 1}
    assert model[0](torch.ones(1, 4)).tolist() == [[0.0] * 4]
    assert model[2].forward == native


def test_attention_op_without_cache_writes_zeros() -> None:
    layer = Attention("a", 2, 1, 4, 0.5)
    q, k, v = torch.ones(3, 8), torch.ones(3, 4), torch.ones(3, 4)
    with set_forward_context(ForwardContext(None, {"a": layer})):
        assert layer(q, k, v).tolist() == [[0.0] * 8] * 3
    with pytest.raises(RuntimeError, match="no forward context"):
        layer(q, k, v)


def test_dynamo_traces_the_whole_model_once_for_any_number_of_tokens() -> None:
    config = PRESETS["tiny"]
    model = build_model(config, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)
    fill_dummy_weights(model, 0)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        model.model,
        backend=backend,
        fullgraph=True,
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )
    with torch.inference_mode(), set_forward_context(ForwardContext(None, model.attention_layers())):
        for count in (5, 1, 2, 64):
            ids, positions = torch.arange(count) % config.vocab_size, torch.arange(count)
            torch._dynamo.mark_dynamic(ids, 0)
            torch._dynamo.mark_dynamic(positions, 0)
            torch.testing.assert_close(compiled(ids, positions), model(ids, positions))
    assert len(graphs) == 1
    ops = [node for node in graphs[0].graph.nodes if node.target == torch.ops.benchserve.attention.default]
    packets = [node for node in graphs[0].graph.nodes if node.target == torch.ops.benchserve.attention]
    assert len(ops) + len(packets) == config.num_layers
    torch._dynamo.reset()
