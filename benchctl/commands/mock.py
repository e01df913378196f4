"""`benchctl mock`: a scripted server that streams as fast as it can, to measure load generators against."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mock(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8001,
    ttft: Annotated[float, typer.Option(help="Seconds from a request to its first event.")] = 0.0,
    itl: Annotated[float, typer.Option(help="Seconds between two writes; 0: as fast as it goes.")] = 0.0,
    events_per_write: Annotated[int, typer.Option(help="Events in one write.")] = 1,
    tokens_per_event: Annotated[int, typer.Option(help="Tokens in one event.")] = 1,
    stall: Annotated[
        list[str] | None,
        typer.Option(metavar="EVENT:SECONDS", help="Wait before this event of every answer; repeatable."),
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:EVERY[:AFTER]",
            help="Fail every n-th request, after so many events: 503, reset, error (an error event), truncate or "
            "abort (finish_reason abort).",
        ),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="JSONL with the time of every write, by the mock's own clock.")
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write {url, port, pid} here as JSON when listening.")] = None,
) -> None:
    """Serve scripted completions and chat completions until Ctrl-C or SIGTERM."""
    from benchctl.mock.process import serve_mock
    from benchctl.mock.script import MockOptions, parse_failures, parse_stalls

    options = MockOptions(
        host=host,
        port=port,
        ttft_s=ttft,
        itl_s=itl,
        events_per_write=events_per_write,
        tokens_per_event=tokens_per_event,
        stalls=parse_stalls(stall or ()),
        failures=parse_failures(fail or ()),
        log=str(log) if log else None,
    )
    serve_mock(options, ready_file=ready_file, on_ready=lambda url: typer.echo(f"Ready: {url}", err=True))


def register(app: typer.Typer) -> None:
    app.command(name="mock")(mock)
