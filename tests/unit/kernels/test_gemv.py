"""Which kernel multiplies how many rows, and that a start compiles just those. What they compute: `interpreted`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.kernels import gemv, install, linear_op
from server.models.config import ModelConfig
from server.models.decoder import CausalLM, FeedForward, build_model

SMALL, LARGE = (4096, 1024), (28672, 4096)


ROWS_AT_ONCE, BY_COLUMN = gemv.GemvConfig(4, 256, 4, ahead=8), gemv.GemvConfig(2, 1024, 4)


@pytest.mark.parametrize(
    ("rows", "size", "gated", "config"),
    [
        (0, SMALL, False, None),
        (1, SMALL, False, ROWS_AT_ONCE),
        (1, LARGE, False, BY_COLUMN),
        (2, LARGE, False, BY_COLUMN),
        (1, (4096, 14336), False, gemv.GemvConfig(1, 1024, 4, ahead=8)),
        (1, LARGE, True, gemv.GemvConfig(1, 1024, 4)),
        (3, LARGE, False, None),
        (4, LARGE, True, None),
        (4, SMALL, False, ROWS_AT_ONCE),
        (4, SMALL, True, ROWS_AT_ONCE),
        (5, SMALL, False, gemv.GemvConfig(32, 128, 4, 5)),
        (8, (1024, 3072), False, gemv.GemvConfig(8, 256, 1, 5)),
        (8, SMALL, True, None),
        (8, LARGE, False, None),
        (9, SMALL, False, None),
        (256, SMALL, False, None),
    ],
)
def test_the_choice_of_a_kernel(rows: int, size: tuple[int, int], gated: bool, config: gemv.GemvConfig | None) -> None:
    assert gemv.config_for(rows, *size, gated=gated) == config


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_rows_of_a_warm_up_meet_every_kernel(size: tuple[int, int], gated: bool) -> None:
    def kernels(numbers: list[int]) -> set[tuple[int, gemv.GemvConfig]]:
        chosen = {rows: gemv.config_for(rows, *size, gated=gated) for rows in numbers}
        return {(gemv._shared(rows), config) for rows, config in chosen.items() if config is not None}

    assert kernels(gemv.rows_to_warm_up(*size)) == kernels(list(range(600)))


CONFIGS = {
    gemv._best_config(rows, n, k, gated=gated)
    for rows in (1, 2, 4)
    for n, k in (SMALL, LARGE, (4096, 14336))
    for gated in (False, True)
}


@pytest.mark.parametrize("config", sorted(CONFIGS, key=str))
@pytest.mark.parametrize("k", [8, 1024, 2048, 3072, 4096, 5120, 14336, 28672])
def test_what_is_read_ahead_leaves_whole_turns_of_the_loop(k: int, config: gemv.GemvConfig) -> None:
    blocks, ahead = k // config.block_k, gemv._blocks_ahead(k, config)
    assert 0 <= ahead <= min(blocks, config.ahead)
    assert (blocks - ahead) % gemv._UNROLL == 0


def test_too_few_blocks_ahead_are_refused() -> None:
    with pytest.raises(ValueError, match="ahead"):
        gemv.GemvConfig(1, 1024, 4, ahead=2)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """What the kernels that stand in for ours were asked for: name, size of the weight, rows that share a kernel."""
    met: set[tuple[Any, ...]] = set()

    def gemv_(x: torch.Tensor, weight: torch.Tensor, bias: Any, *, config: Any) -> torch.Tensor:
        met.add(("gemv", weight.shape, gemv._shared(x.shape[0]), config))
        return x.new_zeros(x.shape[0], weight.shape[0])

    def gated(x: torch.Tensor, weight: torch.Tensor, bias: Any, *, config: Any) -> torch.Tensor:
        met.add(("gated", weight.shape, gemv._shared(x.shape[0]), config))
        return x.new_zeros(x.shape[0], weight.shape[0] // 2)

    def silu(x: torch.Tensor) -> torch.Tensor:
        met.add(("silu", x.shape[1]))
        return x[:, : x.shape[1] // 2]

    monkeypatch.setattr(linear_op, "gemv", gemv_)
    monkeypatch.setattr(linear_op, "gated_gemv", gated)
    monkeypatch.setattr(linear_op, "silu_and_mul", silu)
    monkeypatch.setattr(install, "silu_and_mul", silu)
    return met


def make_model() -> CausalLM:
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
    )
    return build_model(config, device=torch.device("cpu"), dtype=torch.bfloat16, max_positions=128)


@pytest.mark.parametrize("elements", [0, 1 << 20])
def test_a_start_compiles_what_steps_can_ask_for(
    elements: int, launched: set[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemv, "_SMALL", elements)
    model = make_model()
    with torch.inference_mode():
        install.warm_up_layers(model, norms=False)
        warmed = set(launched)
        launched.clear()
        for module in model.modules():
            function: Any = linear_op.linear
            if isinstance(module, FeedForward):
                module, function = module.gate_up_proj, linear_op.gated_linear
            elif not isinstance(module, install.Linear) or module in [
                other.gate_up_proj for other in model.modules() if isinstance(other, FeedForward)
            ]:
                continue
            for rows in range(1, 20):
                function(torch.zeros(rows, module.in_features, dtype=torch.bfloat16), module.weight, module.bias)
    assert warmed == launched
    assert any(name == "gated" for name, *_ in warmed)


def test_what_a_kernel_cannot_read_goes_to_cublas(launched: set[tuple[Any, ...]]) -> None:
    half = torch.ones(2, 24, dtype=torch.float16)
    for x, weight in (
        (half, torch.ones(6, 24)[:, :].half().T.contiguous().T),
        (half[:, :12], torch.ones(6, 12).half()),
        (torch.ones(24, 2).half().T, torch.ones(6, 24).half()),
        (half.float(), torch.ones(6, 24)),
    ):
        assert torch.equal(linear_op.linear(x, weight, None).float(), torch.full((2, 6), float(x.shape[1])))
    assert launched == set()
    linear_op.linear(half, torch.ones(6, 24).half(), None)
    assert {name for name, *_ in launched} == {"gemv"}


def test_eager_layers_choose_alike(launched: set[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "gemv", linear_op.gemv)
    layer: Any = SimpleNamespace(weight=torch.ones(6, 24).half(), bias=None)
    forward = install._linear(layer)
    assert forward is not None
    for rows in range(1, 12):
        assert forward(torch.ones(rows, 24).half()).shape == (rows, 6)
    assert {(rows, config) for _, _, rows, config in launched} == {
        *((rows, ROWS_AT_ONCE) for rows in (1, 2, 4)),
        (gemv.MAX_ROWS, gemv.GemvConfig(8, 256, 1, 5)),
    }


def test_candidates_of_a_sweep_are_for_the_kernel_that_runs_them() -> None:
    from benchctl.kernelbench.sweep import _gemv_trials

    for trial in _gemv_trials(torch.device("cpu"), torch.bfloat16, 16, 128):
        if trial.config != "cuBLAS":
            rows = int(trial.case.shape.rsplit(" x ", 2)[0].rsplit(" ", 1)[1])
            # The GEMV has no stages, and the other kernel several.
            assert ("num_stages=1 " in trial.config) == (rows in gemv._GEMV_ROWS), trial.case.shape
