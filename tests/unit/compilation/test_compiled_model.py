"""The compiled forward pass: equal to the model's own, for any batch, without compiling again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from server.compilation.counters import CompileCounters
from server.forward_context import ForwardContext, set_forward_context
from tests.unit.compilation.conftest import Compiled
from tests.unit.compilation.models import (
    FAMILIES,
    TOKEN_BUDGET,
    VOCAB,
    logprobs,
    make_compiler,
    make_model,
    make_runner,
)

TOLERANCE = 1e-4


def some_prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def assert_equals_eager(model_of: Compiled) -> None:
    runner = make_runner(model_of.model)
    prompts = some_prompts([1, 9, 3, 11])
    for chunk in (1, 5, 6):
        runner.model_forward = model_of.model.model
        expected = logprobs(runner, prompts, chunk)
        runner.model_forward = model_of.compiler.compiled.bind()
        torch.testing.assert_close(logprobs(runner, prompts, chunk), expected, atol=TOLERANCE, rtol=0)


def test_equals_eager(compiled: Compiled) -> None:
    assert_equals_eager(compiled)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_every_family_equals_eager(family: str, tmp_path: Path) -> None:
    model = make_model(FAMILIES[family])
    compiler = make_compiler(model, tmp_path / "cache", tmp_path / "work")
    compiler.build()
    compiler.publish()
    assert compiler.compiled.plan.num_pieces == 3
    assert_equals_eager(Compiled(model, compiler, tmp_path / "cache"))


def test_every_batch_size_runs_without_compiling(compiled: Compiled) -> None:
    forward = compiled.compiler.compiled.bind()
    counters = CompileCounters()
    counters.mark_ready()
    sizes = list(range(1, TOKEN_BUDGET + 1))
    random.Random(1).shuffle(sizes)
    context = ForwardContext(None, compiled.model.attention_layers())
    with torch.inference_mode(), set_forward_context(context):
        for size in sizes:
            input_ids = torch.randint(0, VOCAB, (size,))
            positions = torch.arange(size)
            expected = compiled.model.model(input_ids, positions)
            torch.testing.assert_close(forward(input_ids, positions), expected, atol=TOLERANCE, rtol=0)
    assert (counters.num_compilations, counters.num_jit_events) == (0, 0)


def test_weights_are_read_when_run(compiled: Compiled) -> None:
    """Weights are inputs of the pieces: the compiled form of an architecture serves any checkpoint of it."""
    other = make_model()
    for parameter in other.parameters():
        parameter.mul_(0.5)
    compiled.compiler.compiled.model = other.model
    try:
        forward = compiled.compiler.compiled.bind()
    finally:
        compiled.compiler.compiled.model = compiled.model.model
    input_ids, positions = torch.arange(7), torch.arange(7)
    with torch.inference_mode(), set_forward_context(ForwardContext(None, other.attention_layers())):
        expected = other.model(input_ids, positions)
        torch.testing.assert_close(forward(input_ids, positions), expected, atol=TOLERANCE, rtol=0)


def test_a_pass_lets_go_of_what_it_no_longer_needs(compiled: Compiled) -> None:
    forward = compiled.compiler.compiled.bind()
    context = ForwardContext(None, compiled.model.attention_layers())
    with torch.inference_mode(), set_forward_context(context):
        slots = forward.start(torch.arange(4), torch.arange(4))
        for step in forward.steps:
            forward.run_step(step, slots)
    assert [slot for slot, value in enumerate(slots) if value is not None] == [forward.output_slot]
