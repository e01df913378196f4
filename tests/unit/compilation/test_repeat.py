"""A plan of three layers, continued to any depth, is the plan of a model captured whole."""

from __future__ import annotations

import msgspec
import pytest

from server.compilation.capture import capture
from server.compilation.plan import Plan
from server.compilation.repeat import SAMPLE, repeat_layers, same_layers, shortened
from server.compilation.split import split
from tests.unit.compilation.models import CPU, FAMILIES, make_model


@pytest.fixture(params=["llama", "qwen3"])
def deep_config(request: pytest.FixtureRequest) -> object:
    return msgspec.structs.replace(FAMILIES[request.param], num_layers=5)


@pytest.mark.parametrize("with_kernels", [False, True])
def test_repeated_plan_is_that_of_the_whole_model(deep_config: object, with_kernels: bool) -> None:
    whole_model = make_model(deep_config)  # type: ignore[arg-type]
    if with_kernels:
        pytest.importorskip("triton")
        from server.kernels.install import install_compiled_kernels

        whole_model.half()
        assert install_compiled_kernels(whole_model)["block"] == 5
    model = whole_model.model
    whole = split(capture(model, 7, CPU))
    short, num_layers = shortened(model)
    assert (num_layers, len(short.layers), len(model.layers)) == (5, SAMPLE, 5)  # type: ignore[arg-type]
    assert short.layers[2] is model.layers[2]  # type: ignore[index]
    sample = split(capture(short, 7, CPU))
    repeated = repeat_layers(sample.plan, num_layers)
    repeated.check()
    assert repeated == whole.plan
    assert whole.plan.num_pieces == 3


def test_layers_that_differ_are_captured_whole() -> None:
    model = make_model(msgspec.structs.replace(FAMILIES["llama"], num_layers=5)).model
    assert same_layers(model.layers)
    model.layers[3].input_layernorm.eps = 1e-3
    assert shortened(model) == (model, 5)


def test_a_plan_of_another_depth_is_refused() -> None:
    model = make_model().model
    plan: Plan = split(capture(model, 7, CPU)).plan
    with pytest.raises(ValueError, match="2 attention calls"):
        repeat_layers(plan, 4)
