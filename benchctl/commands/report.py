"""`benchctl report`: render results again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from server.errors import UserError


def report(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Result directory of a matrix or of runs, or one result file."),
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option("--format", "-f", help="html, md, csv, json, with commas between; default: html,md,csv."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Directory for report.FORMAT, or a file or - for one format; default: DIR."
        ),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of results, and exit.")] = False,
) -> None:
    """Render reports from the raw results in DIR and show them in the terminal."""
    if schema:
        from reports.jsonschema import json_schema

        typer.echo(json_schema())
        return
    if directory is None:
        raise UserError("report: name a result directory, e.g. benchctl report benchctl-results")
    from reports.directory import load_results
    from reports.results import explain_os_error, write_text
    from reports.writers import FORMATS, parse_formats, write_reports

    formats = parse_formats(output_format or "html,md,csv")
    results = load_results(directory)
    if output is not None and (str(output) == "-" or ((output.suffix or output.exists()) and not output.is_dir())):
        if len(formats) != 1:
            raise UserError(f"--output {output}: takes one format; choose it with --format {'|'.join(FORMATS)}")
        text = FORMATS[formats[0]](results)
        if str(output) == "-":
            sys.stdout.write(text)
        else:
            typer.echo(write_text(output, text), err=True)
        return
    folder = output or (directory if directory.is_dir() else directory.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(explain_os_error(folder, error)) from error
    from reports.console import print_report, report_console

    written = write_reports(results, folder, formats)
    console = report_console()
    print_report(results, console)
    for path in written:
        console.print(str(path), soft_wrap=True, highlight=False)


def register(app: typer.Typer) -> None:
    app.command(name="report")(report)
