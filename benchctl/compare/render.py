"""A comparison for the terminal, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from benchctl.compare.compare import CellComparison, Change, ComparisonTable, Row
from benchctl.gate.settings import DEFAULT_MIN_EFFECT
from reports.markdown import escape_cell, escape_code
from reports.metrics import METRICS
from reports.verdict_text import percent

# A change without an interval is coloured from here on; with an interval, when that leaves zero out.
_UNSURE_BEYOND = 0.05


def render_console(table: ComparisonTable) -> RenderableType:
    parts: list[RenderableType] = []
    for cell in table.cells:
        parts += [Text(f"! {problem}", "yellow") for problem in cell.problems]
        parts.append(Padding(_cell_table(table, cell), (0, 0, 1, 0)))
    for label, names in table.only_in.items():
        parts.append(Text(f"only in {label}: {', '.join(names)}", "dim"))
    if min(table.runs) == 1:
        parts.append(Text("One run on a side says nothing about the spread between runs: no interval.", "dim"))
    return Group(*parts)


def render_markdown(table: ComparisonTable) -> str:
    lines = []
    for cell in table.cells:
        lines += [f"### `{escape_code(cell.cell_id)}`", ""]
        lines += [f"- {escape_cell(problem)}" for problem in cell.problems] + ([""] if cell.problems else [])
        lines.append("| | " + " | ".join(escape_cell(label) for label in table.labels) + " |")
        lines.append("|---|" + "---:|" * len(table.labels))
        for row in cell.rows:
            metric = METRICS[row.metric]
            values = [f"{metric.format(other.value)} ({change_text(other)})" for other in row.others]
            lines.append(f"| {metric.label} | {metric.format(row.baseline)} | " + " | ".join(values) + " |")
        lines.append("")
    for label, names in table.only_in.items():
        lines.append(f"Only in {escape_cell(label)}: {', '.join(f'`{escape_code(name)}`' for name in names)}\n")
    return "\n".join(lines) + "\n"


def render_json(table: ComparisonTable) -> str:
    return msgspec.json.format(msgspec.json.encode(table), indent=2).decode() + "\n"


FORMATS: dict[str, Callable[[ComparisonTable], str]] = {"md": render_markdown, "json": render_json}


def change_text(change: Change) -> str:
    """`+4.2%` or `+4.2% [+1.0% to +7.5%]`."""
    text = percent(change.change)
    return text if change.low is None else f"{text} [{percent(change.low)} to {percent(change.high)}]"


def style_of(row: Row, change: Change) -> str:
    """Green for better, red for worse, nothing for what the runs do not show."""
    metric = METRICS[row.metric]
    if change.change is None:
        return "dim"
    style = "green" if (change.change > 0) == metric.higher_is_better else "red"
    if change.low is not None and change.high is not None:
        return style if change.low > 0 or change.high < 0 else ""
    return style if abs(change.change) >= DEFAULT_MIN_EFFECT.get(row.metric, _UNSURE_BEYOND) else ""


def _cell_table(comparison: ComparisonTable, cell: CellComparison) -> Table:
    table = Table(
        title=Text(cell.cell_id, "bold"),
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    table.add_column("")
    table.add_column(comparison.labels[0], justify="right", overflow="fold")
    for label, name in zip(comparison.labels[1:], cell.others, strict=True):
        table.add_column(label if name in ("", cell.cell_id) else f"{label}\n{name}", justify="right", overflow="fold")
        table.add_column("change", justify="right")
    for row in cell.rows:
        metric = METRICS[row.metric]
        cells: list[RenderableType] = [metric.label, metric.format(row.baseline)]
        for other in row.others:
            cells += [metric.format(other.value), Text(change_text(other), style_of(row, other))]
        table.add_row(*cells)
    return table
