"""`benchctl run`: one load run (or a series of them) against a URL or a server that we start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_TARGET = "Target"
_TRAFFIC = "Traffic"
_SERIES = "Series"
_CLIENT = "Client"
_REPEATABLE = {"server": "server", "set_": "assignments", "slo": "slos"}
"""Options that may be given several times, and the fields that hold them."""


def run(
    *,
    # Target
    url: Annotated[
        str | None,
        typer.Option(help="OpenAI-compatible endpoint, as http://127.0.0.1:8000.", rich_help_panel=_TARGET),
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Start a server with this model.", rich_help_panel=_TARGET)
    ] = None,
    engine: Annotated[
        Literal["benchctl", "vllm", "sglang"], typer.Option(help="What --serve starts.", rich_help_panel=_TARGET)
    ] = "benchctl",
    mode: Annotated[
        Literal["compile", "eager"] | None, typer.Option(help="With --serve.", rich_help_panel=_TARGET)
    ] = None,
    attention_backend: Annotated[
        Literal["auto", "FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA"] | None,
        typer.Option(help="With --serve.", rich_help_panel=_TARGET),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="With --serve: a flag, as max_model_len=2048.", rich_help_panel=_TARGET),
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="Which API.", rich_help_panel=_TARGET)
    ] = "completions",
    model: Annotated[
        str | None,
        typer.Option(help="With --url: name in requests; default: the only one it serves.", rich_help_panel=_TARGET),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.", rich_help_panel=_TARGET)
    ] = None,
    # Traffic
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            "-w",
            metavar="SPEC",
            help="NAME, NAME:key=value,... or JSON (see `benchctl workload ls`).",
            rich_help_panel=_TRAFFIC,
        ),
    ] = "synthetic",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A workload's parameter.", rich_help_panel=_TRAFFIC),
    ] = None,
    num_requests: Annotated[int | None, typer.Option("--num-requests", "-n", rich_help_panel=_TRAFFIC)] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals per second.", rich_help_panel=_TRAFFIC)] = None,
    concurrency: Annotated[int | None, typer.Option(help="Users of a closed loop.", rich_help_panel=_TRAFFIC)] = None,
    arrival: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="As gamma:rate=8,burstiness=0.5, burst or JSON.", rich_help_panel=_TRAFFIC),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="No request starts after these seconds.", rich_help_panel=_TRAFFIC)
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(help="Most requests in flight; waiting counts in TTFT.", rich_help_panel=_TRAFFIC),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.", rich_help_panel=_TRAFFIC)] = 0,
    # Series
    sweep_rate: Annotated[
        str | None, typer.Option(metavar="R,R,...", help="One run per rate.", rich_help_panel=_SERIES)
    ] = None,
    sweep_concurrency: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="One run per number of users.", rich_help_panel=_SERIES)
    ] = None,
    find_max_rate: Annotated[
        bool,
        typer.Option(
            "--find-max-rate",
            help="Search the highest rate at which 99% of the requests meet every --slo; starts at --rate (or 1).",
            rich_help_panel=_SERIES,
        ),
    ] = False,
    # Client
    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="'ttft:200ms tpot:20ms'", help="Objective for goodput.", rich_help_panel=_CLIENT),
    ] = None,
    warmup: Annotated[
        str, typer.Option(metavar="5s|20|10%", help="Excluded at the start.", rich_help_panel=_CLIENT)
    ] = "0s",
    cooldown: Annotated[
        str, typer.Option(metavar="5s|20|10%", help="Excluded at the end.", rich_help_panel=_CLIENT)
    ] = "0s",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Sending processes; default: half of the cores, 1 to 8 (at least 2 above 250 requests/s).",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds per request.", rich_help_panel=_CLIENT)] = 600.0,
    retries: Annotated[
        int, typer.Option(help="Attempts after a connect error, reset, 429 or 5xx; counted.", rich_help_panel=_CLIENT)
    ] = 0,
    force_lengths: Annotated[
        bool, typer.Option(help="Send ignore_eos with requests of forced length.", rich_help_panel=_CLIENT)
    ] = True,
    continuous_usage: Annotated[
        bool, typer.Option("--continuous-usage", help="Ask for token counts per event.", rich_help_panel=_CLIENT)
    ] = False,
    max_client_lag: Annotated[
        float,
        typer.Option(
            help="Seconds; a p99 of sent - scheduled above it (and above 10% of the median TTFT) invalidates the run.",
            rich_help_panel=_CLIENT,
        ),
    ] = 0.005,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Counts text prompts (default: the model's), and output of a server without usage.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for results and reports.")] = Path(
        "benchctl-run"
    ),
) -> None:
    """Send a workload to a server, measure, write results and reports.

    Exit code: 0 measured, 1 the run failed or its client was saturated, 2 bad input, 130 interrupted (partial results
    are kept).
    """
    options: dict[str, Any] = dict(locals())  # every option of the command is a field of its request
    from benchctl.loadgen.command import RunRequest, execute

    repeatable: dict[str, Any] = {field: options.pop(name) or [] for name, field in _REPEATABLE.items()}
    code = execute(RunRequest(**options, **repeatable))
    if code:
        raise typer.Exit(code)


def register(app: typer.Typer) -> None:
    app.command(name="run")(run)
