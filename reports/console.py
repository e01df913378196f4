"""Rich tables for the terminal: the same content as the other reports, problems first."""

from __future__ import annotations

import os
import sys

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reports import formatting
from reports.directory import ResultSet
from reports.goodput import goodput_rows
from reports.metrics import pick
from reports.reference import reference_rows
from reports.remarks import remarks
from reports.schema import CellResult, Status
from reports.view import COMPARED, View, known_columns

STYLES: dict[Status, str] = {
    "ok": "green",
    "invalid": "yellow",
    "unsupported": "dim",
    "failed": "bold red",
    "timeout": "red",
    "interrupted": "yellow",
}
_COLUMNS = pick("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "itl_p99_s", "requests_per_s")
_STARTS = pick("to_healthy_cold_s", "to_healthy_warm_s", "to_first_token_cold_s", "to_first_token_warm_s")


class _ReportConsole(Console):
    def on_broken_pipe(self) -> None:
        """The reader has gone (`| head`); what is measured and written goes on without it."""
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # or the rest would be tried, and complained about, at the end
        os.close(null)


def report_console() -> Console:
    """Standard output; in a log or a pipe, which has no width, wide enough for the tables (COLUMNS overrides)."""
    console = _ReportConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 140
    return console


def print_report(results: ResultSet, console: Console) -> None:
    """Print the whole report."""
    console.print(render(results))


def render(results: ResultSet) -> RenderableType:
    view = View(results)
    parts: list[RenderableType] = [_headline(view)]
    parts += [_problem(cell) for cell in view.problems]
    parts += [_failures(cell) for cell in view.with_failures]
    parts += _group_tables(view)
    last = (_goodput(view), _starts(view), _comparisons(view), _references(view), _unsupported(view), _remarks(view))
    parts += [table for table in last if table is not None]
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def _headline(view: View) -> Text:
    text = Text.assemble(("benchctl ", "bold"), (view.source.title, "bold cyan"), f"  {view.number_of_cells}:")
    for status, number in view.status_counts().items():
        text.append(f"  {number} {status}", STYLES[status])
    if view.source.index is not None and view.source.index.interrupted:
        text.append("  (interrupted: partial results)", "yellow")
    return text


def _problem(cell: CellResult) -> Text:
    text = Text.assemble((cell.status, STYLES[cell.status]), " ", (cell.cell_id, "bold"), "\n")
    text.append(f"  {cell.reason or 'no reason given'}")
    for line in cell.log_tail[-8:]:
        text.append(f"\n  │ {line}", "dim")
    return text


def _failures(cell: CellResult) -> Text:
    assert cell.metrics is not None
    causes = ", ".join(f"{number} {cause}" for cause, number in cell.metrics.errors.items())
    return Text.assemble((f"{cell.metrics.failed} failed requests ", "red"), (cell.cell_id, "bold"), f"  {causes}")


def _group_tables(view: View) -> list[RenderableType]:
    tables: list[RenderableType] = []
    for group in view.tables:
        table = _table(Text.assemble((group.model, "bold"), f"  {group.title}"))
        table.add_column("")
        columns = [group.throughput, *_COLUMNS]
        for metric in columns:
            table.add_column(metric.label, justify="right")
        for label, cell in group.rows:
            style = STYLES[cell.status] if cell.status != "ok" else None
            table.add_row(Text(label), *(metric.text(cell) for metric in columns), style=style)
        tables.append(table)
    return tables


def _goodput(view: View) -> Table | None:
    rows = goodput_rows(view)
    if not rows:
        return None
    table = _table(Text("Goodput", "bold"))
    for name in ("", "", "SLO"):
        table.add_column(name, overflow="fold")
    for name in ("Req/s", "Share", "Requests"):
        table.add_column(name, justify="right")
    for row in rows:
        traffic, slo = Text(row.traffic, "dim"), Text(row.slo)
        table.add_row(Text(row.variant), traffic, slo, row.requests_per_s, row.share, row.requests)
    return table


def _starts(view: View) -> Table | None:
    columns = known_columns(_STARTS, view.servers)
    if not columns:
        return None
    table = _table(Text("Start-up", "bold"))
    table.add_column("")
    for metric in columns:
        table.add_column(metric.label, justify="right")
    for cell in view.servers:
        name = Text.assemble((f"{cell.config.model} ", "dim"), view.variant_label(cell.config))
        table.add_row(name, *(metric.text(cell) for metric in columns))
    return table


def _comparisons(view: View) -> Table | None:
    comparisons = view.comparisons()
    if not comparisons:
        return None
    table = _table(Text("What each choice buys", "bold"))
    table.add_column("")
    table.add_column("")
    for metric in COMPARED:
        table.add_column(metric.label, justify="right")
    for comparison in comparisons:
        cells = []
        for metric in COMPARED:
            value = comparison.ratio(metric)
            better = value is not None and (value > 1) == metric.higher_is_better
            style = "" if value is None or 0.98 < value < 1.02 else "green" if better else "red"
            cells.append(Text(formatting.ratio(value), style))
        table.add_row(Text(comparison.label), Text(comparison.group.title, "dim"), *cells)
    return table


def _references(view: View) -> Table | None:
    rows = reference_rows(view)
    if not rows:
        return None
    title = Text.assemble(("Reference figures", "bold"), f"  {view.source.reference_source or ''}")
    table = _table(title)
    for name in ("", ""):
        table.add_column(name, overflow="fold")
    for name in ("Reference", "Here", "Ratio", "Target", "Limit"):
        table.add_column(name, justify="right")
    styles = {"better": "green", "worse": "red", "same": ""}
    for row in rows:
        ours = Text(row.ours, styles[row.tone])
        table.add_row(Text(row.cell_id), row.metric.label, row.reference, ours, row.ratio, row.target, row.limit)
    return table


def _remarks(view: View) -> RenderableType | None:
    lines = [Text.assemble(one.text, "  ", (one.where, "dim")) for one in remarks(view.cells)]
    return _indented("Remarks", lines) if lines else None


def _unsupported(view: View) -> RenderableType | None:
    reasons: dict[str, list[str]] = {}
    for cell in view.with_status("unsupported"):
        reasons.setdefault(cell.reason or "no reason given", []).append(view.variant_label(cell.config))
    if not reasons:
        return None
    lines = [Text.assemble(f"{', '.join(dict.fromkeys(names))}: ", (why, "dim")) for why, names in reasons.items()]
    return _indented("Unsupported here", lines)


def _indented(title: str, lines: list[Text]) -> RenderableType:
    """Each of `lines` may take several on the screen, all indented."""
    return Group(Text(title, "bold"), *(Padding(line, (0, 0, 0, 2)) for line in lines))


def _table(title: Text) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
