"""`benchctl workload`: what would be sent, without sending it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchctl.preparing import preparing
from reports.results import cannot_be_replaced
from server.errors import UserError
from workloads import build_workload, list_workloads
from workloads.arrivals import Schedule, build_schedule, parse_arrival
from workloads.base import Workload
from workloads.export import ExportHeader, export_workload
from workloads.parameters import parse_assignments, parse_workload
from workloads.summary import LengthSummary, WorkloadSummary, sparkline, summarise
from workloads.token_ids import request_timestamps
from workloads.tokenizer import load_tokenizer

_Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Workload (see `benchctl workload ls`); also NAME:key=value,... or JSON."),
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A parameter; repeatable, dots nest (input_len.median=200)."),
]
_Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
_Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="MODEL_OR_PATH", help="Counts text prompts: a model's name, its folder, or tokenizer.json."),
]
_NumRequests = Annotated[int | None, typer.Option("--num-requests", "-n", help="Short for --set num_requests=N.")]


def ls(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """List the workloads."""
    if as_json:
        typer.echo(msgspec.json.encode(list_workloads()).decode())
        return
    table = Table("workload", "what it sends", box=None)
    for name, about in list_workloads().items():
        table.add_row(name, about)
    Console().print(table)


def show(
    name: _Name,
    *,
    set_: _Set = None,
    seed: _Seed = 0,
    tokenizer: _Tokenizer = None,
    num_requests: _NumRequests = None,
    arrival: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Arrival process for the rate curve, as poisson:rate=8 or JSON; default: the trace's own times.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Print counts, length percentiles, the rate curve, three samples and the digest."""
    workload = _build(name, set_, seed, tokenizer, num_requests)
    schedule = _schedule(workload, arrival, seed)
    with preparing() as on_read:
        summary = summarise(workload, schedule, on_read=on_read)
    if as_json:
        typer.echo(msgspec.json.encode(summary).decode())
    else:
        _print(summary, Console())


def export(
    name: _Name,
    *,
    output: Annotated[str, typer.Option("--output", "-o", help="File to write; `-` for standard output.")] = "-",
    set_: _Set = None,
    seed: _Seed = 0,
    tokenizer: _Tokenizer = None,
    num_requests: _NumRequests = None,
) -> None:
    """Write JSONL that `--workload trace --set path=FILE` replays exactly."""
    workload = _build(name, set_, seed, tokenizer, num_requests)
    try:
        if output == "-":
            _export(workload, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        header = _write(workload, Path(output))
    except BrokenPipeError:
        raise  # the reader has had enough: the command line's framework ends quietly
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
    typer.echo(f"{output}: {header.num_requests} requests, digest {header.digest}", err=True)


def _build(
    name: str, assignments: list[str] | None, seed: int, tokenizer: str | None, num_requests: int | None
) -> Workload:
    spec: dict[str, Any] = {**parse_workload(name), **parse_assignments(assignments or [])}
    if num_requests is not None:
        spec["num_requests"] = num_requests
    return build_workload(spec, seed=seed, tokenizer=load_tokenizer(tokenizer) if tokenizer else None)


def _schedule(workload: Workload, arrival: str | None, seed: int) -> Schedule | None:
    timestamps = request_timestamps(workload.requests)
    if arrival is None:
        if any(time is None for time in timestamps):
            return None
        arrival = "trace"
    return build_schedule(parse_arrival(arrival), len(workload.requests), seed, timestamps_s=timestamps)


def _export(workload: Workload, file: BinaryIO) -> ExportHeader:
    with preparing() as on_read:
        return export_workload(workload, file, on_read)


def _write(workload: Workload, path: Path) -> ExportHeader:
    """Write beside `path` and rename, so that a full disk or an interrupt leaves no half file under the name.

    A device or a pipe is written to directly: renaming over it would replace it.
    """
    if cannot_be_replaced(path):
        with path.open("wb") as file:
            return _export(workload, file)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            header = _export(workload, file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return header


def _line(console: Console, text: Text) -> None:
    """One line, however long: in a pipe, which has no width, it must stay one."""
    console.print(text, soft_wrap=True)


def _print(summary: WorkloadSummary, console: Console) -> None:
    _line(console, Text(f"{summary.name}  seed {summary.seed}", style="bold"))
    _line(console, Text(f"digest {summary.digest}"))
    conversations = f" in {summary.num_conversations} conversations" if summary.num_conversations else ""
    _line(console, Text(f"{summary.num_requests} requests{conversations}, tokenizer {summary.tokenizer or 'none'}"))
    table = Table("length", "requests", "total", "mean", "min", "p50", "p90", "p99", "max", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    _add_row(table, "prompt tokens", summary.prompt_tokens)
    _add_row(table, "prompt chars", summary.prompt_characters)
    _add_row(table, "output tokens", summary.max_tokens)
    console.print(table)
    if curve := summary.rate_curve:
        span_s = curve.bucket_s * len(curve.rates)
        _line(console, Text(f"rate    {sparkline(curve.rates)}"))
        peak = f"peak {curve.peak:.4g}/s in {curve.bucket_s:.3g} s"
        _line(console, Text(f"        0 to {span_s:.4g} s, mean {curve.mean:.4g}/s, {peak}"))
    elif summary.arrival is None:
        _line(console, Text("rate    set by the arrival process (see --arrival)"))
    elif summary.schedule_digest is None:
        _line(console, Text(f"rate    closed loop of {summary.arrival['concurrency']}"))
    else:
        _line(console, Text("rate    all at once"))
    for reason, count in summary.dropped.items():
        _line(console, Text(f"dropped {count}: {reason}"))
    for note in summary.notes:
        _line(console, Text(f"note    {note}"))
    for sample in summary.samples:
        when = "" if sample.timestamp_s is None else f" at {sample.timestamp_s:.3f} s"
        turn = "" if sample.conversation is None else f" conversation {sample.conversation} turn {sample.turn}"
        counted = "?" if sample.prompt_tokens is None else sample.prompt_tokens
        _line(console, Text(f"#{sample.index}{turn}{when}: {counted} in, {sample.max_tokens} out", style="bold"))
        _line(console, Text(f"  {sample.prompt!r}"))


def _add_row(table: Table, label: str, lengths: LengthSummary | None) -> None:
    if lengths is None:
        return
    numbers = [lengths.mean, lengths.min, lengths.p50, lengths.p90, lengths.p99, lengths.max]
    table.add_row(label, str(lengths.count), str(lengths.total), *(f"{number:.6g}" for number in numbers))


def register(app: typer.Typer) -> None:
    """Add the command group to the app."""
    group = typer.Typer(name="workload", no_args_is_help=True, help="What would be sent, without sending it.")
    group.command()(ls)
    group.command()(show)
    group.command()(export)
    app.add_typer(group)
