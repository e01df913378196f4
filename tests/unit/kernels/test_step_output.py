"""The table of whole decode steps."""

from __future__ import annotations

import io

from rich.console import Console

from benchctl.kernelbench.decode_step import StepTime
from benchctl.kernelbench.output import print_steps


def test_a_backend_without_graphs_has_a_dash() -> None:
    text = io.StringIO()
    steps = [
        StepTime("llama", "TRITON_ATTN", 1, 640, 5.0, 4.5, 3.85),
        StepTime("llama", "TORCH_SDPA", 8, 640, 6.0, 5.5, None),
    ]
    print_steps(Console(file=text, width=120), steps)
    _, captured, eager_only = (line.split() for line in text.getvalue().splitlines())
    assert captured == ["llama", "TRITON_ATTN", "1", "x", "640", "5.00", "4.50", "3.85"]
    assert eager_only[-3:] == ["6.00", "5.50", "-"]
