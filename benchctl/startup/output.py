"""A start-up benchmark as a console table, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchctl.startup.summary import KINDS, Spread, Summary
from reports.formatting import UNKNOWN, seconds
from reports.schema import CellResult

MAX_UNACCOUNTED = 0.05
"""Share of a start's time that may be unaccounted before the table says so in colour."""


class StartupDocument(msgspec.Struct, kw_only=True):
    """`--format json`: the summary with every start that it was made from."""

    result: CellResult
    summary: Summary


def as_json(result: CellResult, summary: Summary) -> str:
    document = StartupDocument(result=result, summary=summary)
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def as_table(title: str, summary: Summary) -> RenderableType:
    kinds = _kinds(summary)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("phase", no_wrap=True)
    for kind in kinds:
        table.add_column(f"{kind} (n = {summary.to_healthy[kind].n})", justify="right", no_wrap=True)
        table.add_column("range", justify="right", style="dim", no_wrap=True)
    for name, values, style in _rows(summary):
        cells = [text for kind in kinds for text in _cells(values.get(kind))]
        table.add_row(Text(name, style), *(Text(text, style) for text in cells))
    parts: list[RenderableType] = [Text(title, "bold"), table]
    for kind in kinds:
        share = summary.unaccounted_share(kind)
        if share is not None and share > MAX_UNACCOUNTED:
            parts.append(Text(f"{kind}: {share:.1%} of the time to healthy is unaccounted", "yellow"))
    return Group(*parts)


def as_markdown(title: str, summary: Summary) -> str:
    kinds = _kinds(summary)
    heads = [text for kind in kinds for text in (f"{kind} (n = {summary.to_healthy[kind].n})", "range")]
    lines = [f"### {title}", "", f"| phase | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name, values, _ in _rows(summary):
        cells = [text for kind in kinds for text in _cells(values.get(kind))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def as_csv(summary: Summary) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["phase", "kind", "median_s", "min_s", "max_s", "n"])
    for name, values, _ in _rows(summary):
        for kind, value in values.items():
            writer.writerow([name, kind, f"{value.median:.6f}", f"{value.low:.6f}", f"{value.high:.6f}", value.n])
    return text.getvalue()


def _kinds(summary: Summary) -> list[str]:
    return [kind for kind in KINDS if kind in summary.to_healthy]


def _rows(summary: Summary) -> list[tuple[str, dict[str, Spread], str]]:
    """(name, values, style): the phases, then the totals."""
    rows = [(row.phase, row.seconds, "") for row in summary.phases]
    rows.append(("exec to healthy", summary.to_healthy, "bold"))
    rows.append(("exec to first token", summary.to_first_token, "bold"))
    return rows


def _cells(value: Spread | None) -> tuple[str, str]:
    if value is None:
        return UNKNOWN, ""
    return seconds(value.median), _range(seconds(value.low), seconds(value.high)) if value.n > 1 else ""


def _range(low: str, high: str) -> str:
    """`1.06 – 1.64 s`, `940 ms – 1.20 s`."""
    number, _, unit = low.rpartition(" ")
    return f"{number} – {high}" if high.endswith(f" {unit}") else f"{low} – {high}"
