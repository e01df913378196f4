"""What `benchctl run` does, from its options to its exit code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.status import Status

from benchctl.loadgen.display import print_result, progress_line, render_search, search_line
from benchctl.loadgen.endpoint import EndpointName, parse_endpoint
from benchctl.loadgen.options import LoadOptions
from benchctl.loadgen.run import check_options
from benchctl.loadgen.session import LoadSession, sized_workload
from benchctl.loadgen.sweep import find_max_rate, parse_values
from benchctl.matrix.models import ensure_models
from benchctl.matrix.plan import arrival_label
from benchctl.matrix.progress import Progress
from benchctl.matrix.suite import CLIENT_OPTIONS, check_server_flags
from benchctl.matrix.traffic import check_traffic
from benchctl.preparing import Preparing
from reports.console import print_report, report_console
from reports.directory import ResultSet
from reports.schema import CellConfig, CellResult
from reports.writers import write_reports
from server.errors import UserError
from workloads.arrivals import ARRIVALS, build_schedule, parse_arrival
from workloads.parameters import parse_assignments, parse_workload
from workloads.tokenizer import load_tokenizer

_PROBE_S = 20.0
"""Duration of a search's loads when none is given."""


class RunRequest(msgspec.Struct, kw_only=True):
    """The command's options."""

    url: str | None
    serve: str | None
    engine: str
    mode: str | None
    attention_backend: str | None
    server: list[str]
    endpoint: EndpointName
    model: str | None
    api_key: str | None
    workload: str
    assignments: list[str]
    num_requests: int | None
    rate: float | None
    concurrency: int | None
    arrival: str | None
    duration: float | None
    max_concurrency: int | None
    seed: int
    sweep_rate: str | None
    sweep_concurrency: str | None
    find_max_rate: bool
    slos: list[str]
    warmup: str
    cooldown: str
    workers: int | None
    timeout: float
    retries: int
    force_lengths: bool
    continuous_usage: bool
    max_client_lag: float
    tokenizer: str | None
    output: Path


def execute(request: RunRequest) -> int:
    """Run and print; the exit code. Raises UserError for bad input, before any server is started where possible."""
    if request.url is not None and "//" not in request.url:
        request = msgspec.structs.replace(request, url=f"http://{request.url}")
    options = load_options(request)
    config = msgspec.structs.replace(cell_config(request), client=_said(options))
    check_options(options)
    arrivals = plan_arrivals(request)
    _check_traffic(config, arrivals)
    if request.api_key:
        os.environ["OPENAI_API_KEY"] = request.api_key  # where the control requests look for it
    console = report_console()
    ensure_models([config], console)
    results: ResultSet | None = None
    with _progress(console) as status:
        session = LoadSession(
            config,
            options,
            request.output,
            on_progress=lambda p: _show(status, p),
            on_read=Preparing(lambda text: _say(status, text), drawn=status is not None),
        )
        if request.serve:
            session.prepare(arrivals[0], reseed=len(arrivals) > 1 or request.find_max_rate)
        _say(status, f"starting {request.serve}" if request.serve else f"connecting to {request.url}")
        try:
            with session:
                try:
                    if request.find_max_rate:
                        _search(session, arrivals[0], console, status)
                    else:
                        _series(session, arrivals, console, status)
                finally:
                    results = session.result_set() if session.results else None
        except OSError:  # standard output takes no more; the reports may go elsewhere
            if results is not None:
                write_reports(results, request.output)
            raise
    if results is None:
        return 130 if session.interrupted else 1
    written = write_reports(results, request.output)
    if len(results.results) > 1:
        print_report(results, console)
    for path in written:
        console.print(str(path), soft_wrap=True, highlight=False)
    if session.interrupted:
        console.print("interrupted: results so far are kept", style="yellow")
        return 130
    statuses = {result.status for result in results.results}
    if request.find_max_rate:  # a rate that is too high is an answer, not a failure
        return 0 if "ok" in statuses and not session.over else 1
    return 0 if statuses == {"ok"} else 1


def cell_config(request: RunRequest) -> CellConfig:
    """What all runs of the command have in common. Raises UserError for options that exclude each other."""
    if (request.url is None) == (request.serve is None):
        raise UserError("say what to measure: --url URL for a running endpoint, or --serve MODEL to start one")
    workload = {**parse_workload(request.workload), **parse_assignments(request.assignments)}
    if request.num_requests is not None:
        workload["num_requests"] = request.num_requests
    if request.url is not None:
        parse_endpoint(request.url, request.endpoint)
        if request.mode or request.attention_backend or request.server:
            raise UserError("--mode, --attention-backend and --server are for --serve; an endpoint is as it is")
    elif request.model is not None:
        raise UserError("--model is for --url; with --serve the model is the one that is served")
    server_args = parse_assignments(request.server, "--server")
    check_server_flags(server_args, "--server")
    return CellConfig(
        engine=request.engine if request.url is None else "url",
        model=request.serve or request.model or "",
        mode=request.mode,
        attention_backend=request.attention_backend,
        server_args=server_args,
        endpoint=request.endpoint,
        url=request.url,
        workload=workload,
        arrival={},
        seed=request.seed,
        slos=request.slos,
    )


def load_options(request: RunRequest) -> LoadOptions:
    return LoadOptions(
        url=request.url or "",
        model=request.model or "",
        endpoint=request.endpoint,
        api_key=request.api_key,
        workers=request.workers,
        timeout_s=request.timeout,
        retries=request.retries,
        force_lengths=request.force_lengths,
        continuous_usage=request.continuous_usage,
        tokenizer=request.tokenizer,
        slos=tuple(request.slos),
        warmup=request.warmup,
        cooldown=request.cooldown,
        lag_bound_s=request.max_client_lag,
    )


def _said(options: LoadOptions) -> dict[str, Any]:
    """What the client was told beyond its defaults, for the result: it changes what the figures mean."""
    usual = LoadOptions(url="", model="")
    return {name: value for name in CLIENT_OPTIONS if (value := getattr(options, name)) != getattr(usual, name)}


def plan_arrivals(request: RunRequest) -> list[dict[str, Any]]:
    """The arrival process of every run; of a search, that of its first probe. Raises UserError."""
    given = {
        "--rate": request.rate,
        "--concurrency": request.concurrency,
        "--arrival": request.arrival,
        "--sweep-rate": request.sweep_rate,
        "--sweep-concurrency": request.sweep_concurrency,
    }
    used = [name for name, value in given.items() if value is not None]
    if request.find_max_rate:
        if not request.slos:
            raise UserError("--find-max-rate needs an objective: add --slo 'ttft:200ms tpot:20ms'")
        if set(used) - {"--rate"}:
            raise UserError(f"--find-max-rate sets the rate itself; leave {used[0]} out (--rate is where it starts)")
        rate = 1.0 if request.rate is None else request.rate
        duration = _PROBE_S if request.duration is None and request.num_requests is None else request.duration
        return [_bounded({"name": "poisson", "rate": rate, "exact_rate": True}, duration, request.max_concurrency)]
    if len(used) != 1:
        said = " and ".join(used) if used else "nothing"
        raise UserError(
            f"say in one way how requests arrive (--rate 4, --concurrency 8 or --arrival burst), not {said}"
        )
    arrivals: list[dict[str, Any]]
    if request.sweep_rate is not None:
        arrivals = [{"name": "poisson", "rate": rate} for rate in parse_values(request.sweep_rate, "--sweep-rate")]
    elif request.sweep_concurrency is not None:
        values = parse_values(request.sweep_concurrency, "--sweep-concurrency")
        if not all(value.is_integer() for value in values):
            raise UserError(f"--sweep-concurrency {request.sweep_concurrency}: numbers of users are whole")
        arrivals = [{"name": "concurrency", "concurrency": int(value)} for value in values]
    elif request.rate is not None:
        arrivals = [{"name": "poisson", "rate": request.rate}]
    elif request.concurrency is not None:
        arrivals = [{"name": "concurrency", "concurrency": request.concurrency}]
    else:
        assert request.arrival is not None
        arrivals = [parse_arrival(request.arrival)]
    return [_bounded(arrival, request.duration, request.max_concurrency) for arrival in arrivals]


def _bounded(arrival: dict[str, Any], duration: float | None, max_concurrency: int | None) -> dict[str, Any]:
    if duration is not None:
        process = ARRIVALS.get(str(arrival["name"]))
        if process is not None and "duration_s" not in process.__struct_fields__:
            raise UserError(f"--duration: does not apply to arrival {arrival['name']}, whose own times end it")
        arrival["duration_s"] = duration
    if max_concurrency is not None:
        if arrival["name"] == "concurrency":
            raise UserError("--max-concurrency is for open loops; a closed loop has --concurrency")
        arrival["max_concurrency"] = max_concurrency
    return arrival


def _check_traffic(config: CellConfig, arrivals: list[dict[str, Any]]) -> None:
    """Find what is wrong with the arrivals and the workload, as far as it does not take the model."""
    for arrival in arrivals:
        build_schedule(arrival, 1, config.seed, timestamps_s=[0.0])
    if given := config.client.get("tokenizer"):
        load_tokenizer(str(given))
    first = arrivals[0]
    workload = sized_workload(config.workload, first)
    check_traffic(msgspec.structs.replace(config, arrival=first, workload=workload))


def _series(session: LoadSession, arrivals: list[dict[str, Any]], console: Console, status: Status | None) -> None:
    for arrival in arrivals:
        _say(status, f"sending: {arrival_label(arrival)}")
        result = session.run(arrival, reseed=len(arrivals) > 1)
        print_result(result, console)
        if session.interrupted or session.over:
            return


def _search(session: LoadSession, arrival: dict[str, Any], console: Console, status: Status | None) -> None:
    def probe(rate: float) -> CellResult | None:
        tried = {**arrival, "rate": round(rate, 4)}
        _say(status, f"sending: {arrival_label(tried)}")
        result = session.run(tried, reseed=True)
        print_result(result, console)
        return None if session.interrupted else result

    search = find_max_rate(probe, arrival["rate"], over=lambda: session.over)
    session.description = search_line(search)
    console.print(render_search(search))


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Status | None]:
    """A line that is drawn again and again, on a terminal."""
    if not console.is_terminal:
        yield None
        return
    with console.status("") as status:
        yield status


def _say(status: Status | None, text: str) -> None:
    """What begins now: in the line that is drawn, or as a line of a log, which would else be silent for minutes."""
    if status is not None:
        status.update(text)
    else:
        with contextlib.suppress(BrokenPipeError):  # who read it has gone; the run goes on
            typer.echo(text, err=True)


def _show(status: Status | None, progress: Progress) -> None:
    if status is not None:
        status.update(progress_line(progress))
