"""A load run on the terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchctl.loadgen.sweep import SearchResult
from benchctl.matrix.progress import Progress
from reports import formatting
from reports.console import STYLES
from reports.remarks import shortfalls
from reports.schema import CellResult, Distribution, LoadMetrics, Throughput

_SHOWN = ("p50", "p90", "p99")


def render_result(result: CellResult) -> RenderableType:
    """Everything measured in one run, problems first."""
    text = Text.assemble((result.status, STYLES[result.status]), "  ", (result.cell_id, "bold"))
    if result.reason:
        text.append(f"\n  {result.reason}", "red" if result.status != "ok" or result.metrics is None else "yellow")
    for line in result.log_tail[-8:]:
        text.append(f"\n  │ {line}", "dim")
    metrics = result.metrics
    if metrics is None:
        return text
    for line in shortfalls(result):
        text.append(f"\n  {line}", "yellow")
    return Group(text, _counts(metrics), _throughput(metrics), _latency(metrics))


def render_search(search: SearchResult) -> RenderableType:
    """The probes of a search in the order of their rates, and what came out."""
    table = Table("req/s", "sent/s", "meets the SLOs", "", box=None, header_style="dim")
    for column in table.columns[:2]:
        column.justify = "right"
    for probe in sorted(search.probes, key=lambda probe: probe.rate):
        verdict = Text("yes", "green") if probe.met else Text("no", "red")
        table.add_row(f"{probe.rate:.4g}", formatting.significant(probe.sent_rate), verdict, Text(probe.why, "dim"))
    return Group(table, Text(search_line(search), "bold"))


def search_line(search: SearchResult) -> str:
    if search.max_rate is None:
        return f"no rate met the SLOs ({search.limited_by})"
    sent = "" if search.sent_rate is None else f"sent at {search.sent_rate:.4g} req/s; "
    return f"highest rate that met the SLOs: {search.max_rate:.4g} req/s ({sent}beyond it: {search.limited_by})"


def progress_line(progress: Progress) -> Text:
    """What runs now, in one line."""
    text = Text(f"{progress.completed}/{progress.total or '?'} requests")
    text.append(f"  {progress.in_flight} in flight", "dim")
    text.append(f"  {formatting.significant(progress.output_tokens_per_s)} tok/s", "green")
    text.append(f"  TTFT {formatting.seconds(progress.ttft_p50_s)}", "cyan")
    if progress.failed:
        text.append(f"  {progress.failed} failed", "red")
    return text


def print_result(result: CellResult, console: Console) -> None:
    console.print(render_result(result))
    console.print()


def _counts(metrics: LoadMetrics) -> RenderableType:
    table = _grid()
    rate = formatting.significant(metrics.achieved_rate)
    if metrics.offered_rate is not None:
        rate += f" of {formatting.significant(metrics.offered_rate)} offered"
    excluded = metrics.excluded_warmup + metrics.excluded_cooldown
    table.add_row("completed", formatting.count(metrics.completed), "failed", formatting.count(metrics.failed))
    table.add_row("sent/s", rate, "retries", formatting.count(metrics.retries))
    if metrics.interrupted or metrics.unsent:
        cut_off, unsent = formatting.count(metrics.interrupted), formatting.count(metrics.unsent)
        table.add_row("interrupted", f"{cut_off} in flight, {unsent} due but unsent", "", "")
    if excluded:
        table.add_row("excluded", f"{metrics.excluded_warmup} warm-up, {metrics.excluded_cooldown} cool-down", "", "")
    for goodput in metrics.goodput:
        rate = f"{formatting.significant(goodput.requests_per_s)} req/s"
        table.add_row("goodput", rate, formatting.share(goodput.share), Text(goodput.slo))
    if metrics.output_token_source != "usage":
        table.add_row("tokens from", metrics.output_token_source, "", "")
    return table


def _throughput(metrics: LoadMetrics) -> RenderableType:
    table = Table("", "window", "req/s", "output tok/s", "total tok/s", box=None, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    _add_throughput(table, "whole run", metrics.throughput)
    if metrics.steady_state is not None:
        _add_throughput(table, "steady state", metrics.steady_state)
    return table


def _add_throughput(table: Table, label: str, throughput: Throughput) -> None:
    rates = (throughput.requests_per_s, throughput.output_tokens_per_s, throughput.total_tokens_per_s)
    table.add_row(label, formatting.seconds(throughput.window_s), *(formatting.significant(rate) for rate in rates))


def _latency(metrics: LoadMetrics) -> RenderableType:
    table = Table("", "n", "mean", *_SHOWN, "max", box=None, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[tuple[str, Distribution | None]] = [
        ("TTFT", metrics.ttft_s),
        ("TTFT from sent", metrics.ttft_from_sent_s),
        ("TTFT steady", metrics.steady_ttft_s),
        ("TPOT", metrics.tpot_s),
        ("ITL", metrics.itl_s),
        ("E2EL", metrics.e2el_s),
        ("client lag", metrics.client_lag_s),
    ]
    for label, values in rows:
        if values is None:
            continue
        if values.n == 0:
            table.add_row(label, "0", Text(values.reason or "", "dim"))
            continue
        numbers = [values.mean, *(values.percentiles.get(name) for name in _SHOWN), values.max]
        table.add_row(label, formatting.count(values.n), *(formatting.seconds(number) for number in numbers))
    return table


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    for style in ("dim", "", "dim", ""):
        table.add_column(style=style)
    return table
