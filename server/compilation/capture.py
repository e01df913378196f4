"""Capture of a model's forward pass as one FX graph, by Dynamo, once.

The graph's inputs are the token ids, the positions, the number of tokens as a symbol, and every parameter and buffer
that the forward reads: weights are inputs, never constants, so that nothing made from the graph holds any. Only
metadata of the weights matters here, which allows capturing while another thread still loads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

INPUT_IDS = "input_ids"
POSITIONS = "positions"


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    graph: fx.GraphModule
    weights: dict[str, str]
    """Placeholder name -> qualified name of the parameter or buffer that it stands for."""
    inputs: dict[str, str]
    """Placeholder name -> `input_ids` or `positions`."""
    num_tokens: frozenset[str]
    """Placeholders that take the number of tokens as an integer."""


class _CapturedError(Exception):
    """Raised in place of running the captured graph: only the graph is wanted."""


def capture(model: nn.Module, num_tokens_hint: int, device: torch.device) -> CapturedGraph:
    """Trace `model(input_ids, positions)` with a symbolic number of tokens.

    Args:
        model: its parameters must not require grad; their contents are not read.
        num_tokens_hint: the number of tokens that the compiler tunes for (>= 2: 0 and 1 are special to the tracer).
        device: where the model's parameters are.

    Raises:
        RuntimeError: the forward reads a tensor that is neither a parameter nor a buffer of `model`, or its graph
            breaks.
    """
    captured: list[CapturedGraph] = []
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    input_ids = torch.zeros(num_tokens_hint, dtype=torch.int64, device=device)
    positions = torch.zeros_like(input_ids)
    step_inputs = {id(input_ids): INPUT_IDS, id(positions): POSITIONS}

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        weights: dict[str, str] = {}
        inputs: dict[str, str] = {}
        num_tokens: set[str] = set()
        for placeholder, example in zip(placeholders, example_inputs, strict=True):
            if isinstance(example, int | torch.SymInt):
                num_tokens.add(placeholder)
            elif id(example) in step_inputs:
                inputs[placeholder] = step_inputs[id(example)]
            elif id(example) in names:
                weights[placeholder] = names[id(example)]
            else:
                raise RuntimeError(f"graph input {placeholder} is neither a parameter nor a buffer of the model")
        captured.append(CapturedGraph(graph, weights, inputs, frozenset(num_tokens)))

        def stop(*_: Any) -> None:
            raise _CapturedError

        return stop

    for tensor in (input_ids, positions):
        torch._dynamo.mark_dynamic(tensor, 0)
    # No guard is ever checked: the graph is called directly afterwards, under the conditions it was captured for.
    compiled = torch.compile(
        model.forward,
        fullgraph=True,
        backend=backend,
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )
    with torch.no_grad():
        try:
            with contextlib.suppress(_CapturedError):
                compiled(input_ids, positions)
        finally:
            torch._dynamo.reset()
    if len(captured) != 1:
        raise RuntimeError(f"expected one graph of the model, captured {len(captured)}")
    return captured[0]
