"""`benchctl compare`: what differs between results, with confidence where there are runs enough."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.errors import UserError


def compare(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="BASELINE OTHER...",
            help="Result files, result directories, or directories with a run in each subdirectory.",
        ),
    ],
    ignore_field: Annotated[
        list[str] | None,
        typer.Option("--ignore-field", metavar="FIELD", help="Compare although this field differs, e.g. cpu."),
    ] = None,
    output_format: Annotated[str, typer.Option("--format", "-f", help="table, md or json.")] = "table",
) -> None:
    """Compare results with the first one, cell by cell and metric by metric.

    Exit code: 0, 2 for bad input, 3 when the results are not comparable (the line names the field that differs).
    """
    from benchctl.compare.compare import compare as compare_results
    from benchctl.compare.render import FORMATS, render_console
    from benchctl.gate.comparable import check_ignored

    if len(results) < 2:
        raise UserError("compare: name at least two results: benchctl compare BASELINE OTHER")
    if output_format != "table" and output_format not in FORMATS:
        raise UserError(f"--format {output_format!r}: choose table, {' or '.join(FORMATS)}")
    table = compare_results(results, check_ignored(ignore_field or ()))
    if output_format == "table":
        from reports.console import report_console

        report_console().print(render_console(table))
    else:
        typer.echo(FORMATS[output_format](table), nl=False)


def register(app: typer.Typer) -> None:
    app.command(name="compare")(compare)
