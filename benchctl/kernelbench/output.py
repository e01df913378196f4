"""The report as a table, JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from benchctl.kernelbench.decode_step import StepTime
from benchctl.kernelbench.host_cost import HostCost
from benchctl.kernelbench.measure import Roofline, Row
from benchctl.kernelbench.sweep import Candidate


def environment(device: torch.device, *, interpreted: bool) -> dict[str, Any]:
    """What the numbers depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "interpreted": interpreted,
    }


def as_json(
    environment: dict[str, Any],
    rows: Sequence[Row],
    *,
    roofline: Roofline | None = None,
    host: Sequence[HostCost] = (),
    candidates: Sequence[Candidate] = (),
    steps: Sequence[StepTime] = (),
) -> str:
    document = {
        "schema": "benchctl.kernels/1",
        "environment": environment,
        "roofline": None
        if roofline is None
        else {"tb_per_s": roofline.bytes_per_s / 1e12, "tflop_per_s": roofline.flops_per_s / 1e12},
        "rows": [_plain(row.as_dict()) for row in rows],
        "host_us": [{"kernel": h.kernel, "shape": h.shape, "us": h.microseconds} for h in host],
        "eager_steps": [asdict(step) for step in steps],
        "candidates": [
            _plain({"kernel": c.kernel, "shape": c.shape, "config": c.config, "us": c.time_us, "error": c.error})
            for c in candidates
        ],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: an error that is not a number is null beside `passed: false`."""
    return {key: None if isinstance(value, float) and value != value else value for key, value in values.items()}


def print_rows(console: Console, rows: Sequence[Row], roofline: Roofline | None) -> None:
    if roofline is not None:
        console.print(
            f"roofline: {roofline.bytes_per_s / 1e12:.2f} TB/s, {roofline.flops_per_s / 1e12:.0f} TFLOP/s (bf16)"
        )
    table = Table(box=None, pad_edge=False)
    for name in ("kernel", "shape", "dtype"):
        table.add_column(name, no_wrap=True)
    timed = any(row.time_us is not None for row in rows)
    for name in ("error", "us", "TB/s", "TFLOP/s", "of roofline") if timed else ("error",):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        error = "-" if row.error is None else f"{row.error:.1e}"
        shown = [error if row.passed else f"[red]{error} > {row.tolerance:.0e}[/red]"]
        if timed:
            shown += [_number(row.time_us, ".1f"), _number(row.tb_per_s, ".2f"), _number(row.tflop_per_s, ".1f")]
            shown.append(_number(row.roofline_share, ".0%"))
        table.add_row(row.kernel, row.shape, row.dtype, *shown)
    console.print(table)


def print_host_costs(console: Console, host: Sequence[HostCost]) -> None:
    table = Table("launch", "shape", "host us", box=None, pad_edge=False)
    for cost in host:
        table.add_row(cost.kernel, cost.shape, f"{cost.microseconds:.1f}")
    console.print(table)


def print_steps(console: Console, steps: Sequence[StepTime]) -> None:
    table = Table(
        "decode step", "backend", "sequences x length", "eager ms", "launches ms", "graph ms", box=None, pad_edge=False
    )
    for step in steps:
        shape = f"{step.sequences} x {step.length}"
        times = (_number(ms, ".2f") for ms in (step.step_ms, step.host_ms, step.graph_ms))
        table.add_row(step.model, step.backend, shape, *times)
    console.print(table)


def print_candidates(console: Console, candidates: Sequence[Candidate], best: int) -> None:
    """The `best` fastest candidates of every shape."""
    table = Table("kernel", "shape", "us", "config", box=None, pad_edge=False)
    for shape in dict.fromkeys(c.shape for c in candidates):
        ranked = sorted((c for c in candidates if c.shape == shape and c.time_us == c.time_us), key=lambda c: c.time_us)
        for candidate in ranked[:best]:
            table.add_row(candidate.kernel, candidate.shape, f"{candidate.time_us:.1f}", candidate.config)
    console.print(table)


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Share of the roofline per case, as one self-contained HTML file."""
    import plotly.graph_objects as go

    timed = [row for row in rows if row.roofline_share is not None]
    figure = go.Figure()
    for kernel in dict.fromkeys(row.kernel for row in timed):
        mine = [row for row in timed if row.kernel == kernel]
        figure.add_bar(
            name=kernel,
            y=[f"{row.kernel} {row.shape} {row.dtype}" for row in mine],
            x=[row.roofline_share for row in mine],
            orientation="h",
            hovertext=[f"{row.time_us:.1f} us, {row.tb_per_s:.2f} TB/s, {row.tflop_per_s:.1f} TFLOP/s" for row in mine],
        )
    figure.update_layout(
        title="Kernels: share of the measured roofline",
        height=200 + 22 * len(timed),
        xaxis={"title": "time that the roofline allows / measured time", "tickformat": ".0%"},
        yaxis={"autorange": "reversed", "automargin": True},
    )
    figure.write_html(path, include_plotlyjs=True)


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
