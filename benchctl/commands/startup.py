"""`benchctl startup`: how long the server takes to start, phase by phase, from cold and from warm caches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from server.errors import UserError

if TYPE_CHECKING:
    from benchctl.startup.measure import Kind
    from benchctl.startup.summary import Summary
    from reports.schema import CellResult

FORMATS = ("table", "json", "md", "csv")


def startup(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Preset, pulled model, checkpoint folder or hub id.")] = "tiny",
    cold: Annotated[bool, typer.Option("--cold", help="Starts with empty compiler and kernel caches.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="Starts with the caches that an earlier one filled.")] = False,
    repeats: Annotated[int, typer.Option("-n", "--repeats", min=1, max=100, help="Starts of each kind.")] = 3,
    mode: Annotated[Literal["compile", "eager"], typer.Option(help="What the server runs.")] = "compile",
    attention_backend: Annotated[
        Literal["auto", "FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA"], typer.Option(help="As for `benchctl serve`.")
    ] = "auto",
    output_format: Annotated[
        str, typer.Option("--format", "-f", help=f"What to print: {', '.join(FORMATS)}.")
    ] = "table",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory for the result file, logs and report.html, .md, .csv."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that one start may take.")] = 600.0,
) -> None:
    """Start the server several times, in fresh processes, and report the median and range of every phase.

    Both kinds of start are measured unless one is chosen. Options of `benchctl serve` may follow `--`:
    `benchctl startup llama-3.1-8b -n 5 -- --max-model-len 4096`.
    """
    if output_format not in FORMATS:
        raise UserError(f"--format {output_format}: give one of {', '.join(FORMATS)}")
    kinds: list[Kind] = ["cold", "warm"] if cold == warm else ["cold"] if cold else ["warm"]

    import tempfile

    from benchctl.startup.measure import parse_arguments

    arguments = parse_arguments(context.args)
    with tempfile.TemporaryDirectory(prefix="benchctl-startup-") as scratch:
        log_dir = Path(scratch) if output is None else output / "logs"
        result, summary = _measure(model, mode, attention_backend, arguments, kinds, repeats, log_dir, timeout)
    if output is not None:
        _write(result, output)
    _print(result, summary, output_format)


def _measure(
    model: str,
    mode: str,
    backend: str,
    arguments: dict[str, object],
    kinds: list[Kind],
    repeats: int,
    log_dir: Path,
    timeout_s: float,
) -> tuple[CellResult, Summary]:
    from rich.console import Console

    from benchctl.startup.measure import as_result, measure_starts, start_config
    from benchctl.startup.summary import summarize
    from benchctl.targets import TargetError, UnsupportedTarget

    _ensure_model(model)
    config = start_config(model, mode, backend, arguments)
    console = Console(stderr=True)
    with console.status("") as status:

        def show(kind: str, number: int, total: int) -> None:
            text = f"{kind} start {number} of {total}" if number else "filling the caches"
            status.update(text)
            if not console.is_terminal:  # a log, which would else be silent for minutes
                typer.echo(text, err=True)

        try:
            starts = measure_starts(config, kinds, repeats, log_dir=log_dir, on_start=show, timeout_s=timeout_s)
        except TargetError as error:
            if isinstance(error, UnsupportedTarget):
                raise UserError(error.reason) from error
            for line in error.log_tail[-12:]:
                console.print(f"  │ {line}", style="dim", markup=False, highlight=False, soft_wrap=True)
            typer.echo(f"benchctl: {error.reason}", err=True)
            raise typer.Exit(1) from error
    return as_result(starts), summarize(starts.reports)


def _ensure_model(model: str) -> None:
    from server.models.registry import must_be_pulled

    if must_be_pulled(model):
        from server.models.pull import pull

        typer.echo(f"{model} is not here yet: pulling it (once)", err=True)
        pull(model)


def _print(result: CellResult, summary: Summary, output_format: str) -> None:
    from rich.console import Console

    from benchctl.startup import output as writing

    title = f"{result.config.model}, {result.cell_id.split('/', 2)[2].replace('/', ', ')}"
    if output_format == "table":
        Console().print(writing.as_table(title, summary))
    elif output_format == "md":
        typer.echo(writing.as_markdown(title, summary), nl=False)
    elif output_format == "csv":
        typer.echo(writing.as_csv(summary), nl=False)
    else:
        typer.echo(writing.as_json(result, summary), nl=False)


def _write(result: CellResult, directory: Path) -> None:
    from reports.directory import load_results
    from reports.results import write_result
    from reports.writers import write_reports

    typer.echo(write_result(result, directory), err=True)
    for path in write_reports(load_results(directory), directory):
        typer.echo(path, err=True)


def register(app: typer.Typer) -> None:
    app.command(name="startup", context_settings={"allow_extra_args": True})(startup)
