"""`benchctl history`: results over commits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reports.metrics import METRICS, Metric
from server.errors import UserError
from workloads.parameters import near_matches

Store = Annotated[
    Path, typer.Option("--store", help="A directory (JSON lines, merges in git), or an SQLite file that ends in .db.")
]
MetricName = Annotated[str, typer.Option("--metric", "-m", help="A metric's key, e.g. tpot_p50_s.")]
Cell = Annotated[str | None, typer.Option("--cell", help="Only cells whose id contains this text.")]
DEFAULT_STORE = Path("benchctl-history")


def add(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="Result files or directories.")],
    store: Store = DEFAULT_STORE,
) -> None:
    """Append results to the store; results that are there already are left alone."""
    from benchctl.gate.runs import load_runs
    from benchctl.history.record import records_of
    from benchctl.history.store import open_store

    target = open_store(store)
    cells = [cell for path in results for run in load_runs(path) for cell in run.cells.values()]
    records = records_of(cells, Path.cwd())
    added = target.add(records)
    skipped = len(cells) - len(records)
    note = f", not kept: {_number(skipped, 'cell')} whose status is not ok" if skipped else ""
    typer.echo(f"{store}: {added} new, {len(records) - added} there before{note}")


def ls(store: Store = DEFAULT_STORE) -> None:
    """List what the store holds: commits, oldest first, with their cells."""
    from benchctl.history.store import open_store

    counts: dict[str, tuple[str, set[str], int]] = {}
    for record in open_store(store).read():
        time, cells, runs = counts.get(record.commit, (record.order[0], set(), 0))
        counts[record.commit] = time, cells | {record.cell_id}, runs + 1
    for commit, (time, cells, runs) in counts.items():
        typer.echo(f"{commit[:12]:<12}  {time}  {_number(len(cells), 'cell')}, {_number(runs, 'measurement')}")


def plot(
    store: Store = DEFAULT_STORE,
    metric: MetricName = "output_tokens_per_s",
    cell: Cell = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write an HTML page with interactive charts, too.")
    ] = None,
) -> None:
    """Show a metric over commits with its change points."""
    from benchctl.history.plot import render_console, render_html
    from benchctl.history.series import build_series
    from benchctl.history.store import open_store
    from reports.console import report_console
    from reports.results import write_text

    chosen = _metric(metric)
    series = build_series(open_store(store).read(), chosen, cell)
    if not series:
        raise UserError(f"{store}: holds no {metric}{f' for a cell with {cell!r} in its id' if cell else ''}")
    written = None
    if output is not None:
        written = write_text(output, render_html(series, f"{chosen.label} over commits"))
    console = report_console()
    console.print(render_console(series))
    if written is not None:
        console.print(str(written), soft_wrap=True, highlight=False)


def bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="Revision before the change.")],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="Revision after it.")],
    store: Store = DEFAULT_STORE,
    metric: MetricName = "output_tokens_per_s",
    suite: Annotated[str, typer.Option("--suite", "-s", help="Suite of the bisecting gate.")] = "gate",
) -> None:
    """Say where a metric got worse between two commits, and how to find the commit."""
    from benchctl.history.bisect import bisect_command, bisect_hints
    from benchctl.history.store import open_store
    from reports.verdict_text import percent

    chosen = _metric(metric)
    hints = bisect_hints(open_store(store).read(), chosen, good, bad, Path.cwd())
    if not hints:
        typer.echo(f"{chosen.label} did not get worse between {good} and {bad} in any measured cell")
        return
    for hint in hints:
        typer.echo(f"{hint.series.cell_id} ({hint.series.machine})")
        typer.echo(f"  {chosen.label} {percent(hint.change)} between {hint.good[:12]} and {hint.bad[:12]}")
        if hint.next_commit is None:
            typer.echo(f"  no commit between: {hint.bad[:12]} made the change")
        else:
            typer.echo(
                f"  {len(hint.commits)} commits to choose from; measure {hint.next_commit[:12]} next, or let git:"
            )
            typer.echo(f"  {bisect_command(hint, suite)}")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _metric(name: str) -> Metric:
    if name not in METRICS:
        raise UserError(f"--metric {name!r}: no such metric; {near_matches(name, METRICS)}")
    return METRICS[name]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Results over commits: store, plot, change points.", no_args_is_help=True)
    for command in (add, ls, plot, bisect):
        group.command()(command)
    app.add_typer(group, name="history")
