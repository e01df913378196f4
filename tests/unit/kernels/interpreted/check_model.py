"""A whole model with the eager kernels in place of its layers gives what the plain layers give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchctl.kernelbench import reference
from benchctl.kernelbench.case import relative_error
from server.attention.base import AttentionSpec
from server.attention.triton_attn import TritonAttentionBackend
from server.attention.warm_up import SyntheticBatch, synthetic_batch
from server.forward_context import ForwardContext, set_forward_context
from server.kernels import block_op, norm_op
from server.kernels.install import install_compiled_kernels, install_eager_kernels
from server.kernels.norm import add_rms_norm
from server.models.config import ModelConfig
from server.models.decoder import CausalLM, build_model

CPU = torch.device("cpu")


def make_model(*, qk_norm: bool, qkv_bias: bool) -> CausalLM:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=211,
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
    model = build_model(config, device=CPU, dtype=torch.float32, max_positions=128)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


class ReferenceBackend(TritonAttentionBackend):
    """The fp32 reference behind the interface of a backend."""

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        real = slot_mapping >= 0
        flat = kv_cache.flatten(1, 2)
        flat[0, slot_mapping[real]], flat[1, slot_mapping[real]] = key[real], value[real]

    def forward(self, query, kv_cache, metadata, scale, output) -> None:  # type: ignore[no-untyped-def]
        output.copy_(reference.attention(query, kv_cache, metadata, scale))


def run(model: CausalLM, backend: TritonAttentionBackend, batch: SyntheticBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every row of the batch, and the last layer's cache."""
    layers = model.attention_layers()
    for layer in layers.values():
        layer.kv_cache, layer.backend = batch.kv_cache.clone(), backend
    rows = batch.query.shape[0]
    meta = batch.metadata
    starts, lengths = meta.query_start_loc_cpu.tolist(), meta.seq_lens_cpu.tolist()
    positions = torch.zeros(rows, dtype=torch.int64)
    for seq, length in enumerate(lengths):
        count = starts[seq + 1] - starts[seq]
        positions[starts[seq] : starts[seq + 1]] = torch.arange(length - count, length)
    ids = torch.arange(rows) * 13 % 211
    with torch.inference_mode(), set_forward_context(ForwardContext(meta, layers, positions=positions)):
        logits = model.compute_logits(model(ids, positions))
    cache = list(layers.values())[-1].kv_cache
    assert cache is not None
    return logits, cache


@pytest.mark.parametrize(("qk_norm", "qkv_bias"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([1, 1, 1], [5, 17, 33]), ([6, 1, 0], [22, 9, 0]), ([12], [12])], ids=str
)
def test_eager_kernels_leave_the_result_unchanged(
    qk_norm: bool, qkv_bias: bool, query_lens: list[int], seq_lens: list[int]
) -> None:
    spec = AttentionSpec(CPU, torch.float32, 4, 2, 32, 16, max_num_seqs=4)
    batch = synthetic_batch(spec, query_lens, seq_lens)
    wanted, wanted_cache = run(make_model(qk_norm=qk_norm, qkv_bias=qkv_bias), ReferenceBackend(spec), batch)
    model = make_model(qk_norm=qk_norm, qkv_bias=qkv_bias)
    installed = install_eager_kernels(model)
    got, got_cache = run(model, TritonAttentionBackend(spec), batch)
    assert installed["rotary"] == 2
    assert installed["silu_and_mul"] == 2
    tokens = batch.metadata.num_tokens
    torch.testing.assert_close(got[:tokens], wanted[:tokens], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_cache, wanted_cache, rtol=1e-4, atol=1e-4)
    assert got.isfinite().all()


def test_profiling_without_a_cache_runs_and_is_finite() -> None:
    model = make_model(qk_norm=False, qkv_bias=False)
    install_eager_kernels(model)
    with torch.inference_mode(), set_forward_context(ForwardContext(None, model.attention_layers())):
        hidden = model(torch.arange(5), torch.arange(5))
    assert hidden.isfinite().all()


def test_compiled_kernels_replace_half_precision_projections_only() -> None:
    assert install_compiled_kernels(make_model(qk_norm=False, qkv_bias=False))["linear"] == 0
    half = make_model(qk_norm=False, qkv_bias=False).to(torch.bfloat16)
    assert install_compiled_kernels(half) == {"linear": 2 * 4 + 1, "rotary": 2, "gated_linear": 2, "block": 2}
    half = make_model(qk_norm=False, qkv_bias=False).to(torch.bfloat16)
    expected = {"linear": 2 * 4 + 1, "rms_norm": 2 * 2 + 1, "rotary": 2, "gated_linear": 2, "block": 2}
    assert install_compiled_kernels(half, norms=True) == expected


@pytest.mark.parametrize(("qk_norm", "qkv_bias"), [(False, False), (True, True)])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1], [17]), ([1, 1], [5, 17]), ([6, 1], [22, 9])], ids=str)
def test_blocks_of_compiled_models_leave_the_result_unchanged(
    qk_norm: bool, qkv_bias: bool, query_lens: list[int], seq_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = AttentionSpec(CPU, torch.float16, 4, 2, 32, 16, max_num_seqs=4)
    batch = synthetic_batch(spec, query_lens, seq_lens)
    plain = make_model(qk_norm=qk_norm, qkv_bias=qkv_bias).half()
    wanted, wanted_cache = run(plain, ReferenceBackend(spec), batch)
    model = make_model(qk_norm=qk_norm, qkv_bias=qkv_bias).half()
    assert install_compiled_kernels(model)["block"] == 2
    got, got_cache = run(model, TritonAttentionBackend(spec), batch)
    assert relative_error((got,), (wanted.float(),)) < 4e-3
    assert relative_error((got_cache,), (wanted_cache.float(),)) < 4e-3
    # The operators have a plain form for the CPU; this is the one for CUDA.
    for name in ("project_norm_gated", "project_norm_project"):
        monkeypatch.setattr(getattr(torch.ops.benchserve, name), "default", getattr(block_op, name))
    got, got_cache = run(model, TritonAttentionBackend(spec), batch)
    assert relative_error((got,), (wanted.float(),)) < 4e-3
    assert relative_error((got_cache,), (wanted_cache.float(),)) < 4e-3


def test_norms_in_a_graph_leave_their_arguments_alone() -> None:
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    before = x.clone(), residual.clone()
    out, total = norm_op._add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    wanted, wanted_total = torch.ops.benchserve.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(total, wanted_total)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-5), (wanted, wanted_total))
    assert torch.equal(residual, wanted_total)


def test_linear_operator_traces_and_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(3, 64), torch.randn(40, 64), torch.randn(40)
    compiled: Callable[..., torch.Tensor] = torch.compile(
        lambda x: torch.ops.benchserve.linear(x, weight, bias), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(x), torch.nn.functional.linear(x, weight, bias))
    gated: Callable[..., torch.Tensor] = torch.compile(
        lambda x: torch.ops.benchserve.gated_linear(x, weight, bias), backend="aot_eager", fullgraph=True
    )
    gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, dim=-1)
    torch.testing.assert_close(gated(x), torch.nn.functional.silu(gate) * up)
