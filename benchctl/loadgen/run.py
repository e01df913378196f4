"""One load run: workers started together on one clock, watched until they end, their records made into metrics."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from benchctl.loadgen.assign import Share, split
from benchctl.loadgen.endpoint import as_messages, parse_endpoint
from benchctl.loadgen.liveness import why_gone
from benchctl.loadgen.options import LoadOptions, LoadOutcome, default_workers
from benchctl.loadgen.process import Cancel, Crashed, Finished, Ready, Start, start_worker
from benchctl.loadgen.recorder import Report
from benchctl.loadgen.records import Records, create_records
from benchctl.matrix.progress import Progress
from benchctl.metrics import Lengths, compute_metrics, parse_exclusion, parse_slo
from reports.results import explain_os_error
from server.errors import UserError
from workloads.arrivals import Schedule
from workloads.base import Workload

_START_LEAD_S = 0.15
_START_LEAD_PER_CONNECTION_S = 0.0005
_PROGRESS_INTERVAL_S = 0.25
_WINDOW_S = 2.0
_CANCEL_LIMIT_S = 10.0
_MOST_WORKERS = 256


class LoadGeneratorError(UserError):
    """The load generator itself failed."""

    exit_code = 1


def run_load(
    options: LoadOptions,
    workload: Workload,
    schedule: Schedule,
    *,
    output: Path,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: threading.Event | None = None,
    forced_lengths: Lengths | None = None,
) -> LoadOutcome:
    """Send the workload as the schedule says and measure; raw records go to the file `output`.

    Blocks until every answer has ended, or `cancel` is set, or an interrupt: KeyboardInterrupt is raised again after
    the workers have ended and their records are on disk. `on_progress` is called four times a second in this thread.
    `forced_lengths`: output tokens that each request of the workload is forced to (0: none), to judge the answers by.

    When a worker dies, the disk fills or the server is gone, the outcome's `aborted` says so, and its metrics are those
    of the records until then.

    Raises:
        UserError: nothing to send, a request that the endpoint cannot take, a file that cannot be written.
        LoadGeneratorError: a worker died or the disk filled before anything was recorded.
    """
    check_options(options)
    slos = [parse_slo(text) for text in options.slos]
    warmup, cooldown = parse_exclusion(options.warmup, "--warmup"), parse_exclusion(options.cooldown, "--cooldown")
    shares = _plan(options, workload, schedule)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        fleet = _Fleet(options, shares, output, on_progress)
        broken: LoadGeneratorError | None = None
        interrupted = False
        try:
            start_ns = fleet.start(workload, schedule)
            try:
                interrupted = fleet.watch(cancel or threading.Event())
            except LoadGeneratorError as error:
                broken = error
        finally:
            fleet.close()
    except OSError as error:
        raise UserError(explain_os_error(output, error)) from error
    if fleet.write_error is not None:
        broken = LoadGeneratorError(explain_os_error(output, OSError(*fleet.write_error)))
    records = Records(output)
    if broken is not None and len(records.rows) == 0:
        raise broken
    gone = fleet.aborted
    if gone is None and broken is None and not interrupted:
        gone = why_gone(records.rows, options.url, options.endpoint)
    metrics = compute_metrics(
        records,
        slos=slos,
        warmup=warmup,
        cooldown=cooldown,
        lag_bound_s=options.lag_bound_s,
        offered_rate=schedule.offered_rate,
        workers=len(shares),
        start_ns=start_ns,
        forced_lengths=forced_lengths if options.force_lengths else None,
    )
    return LoadOutcome(
        records=output,
        metrics=metrics,
        interrupted=interrupted,
        aborted=gone if broken is None else str(broken),
        server_gone=gone is not None,
        error_details=fleet.error_details,
    )


def check_options(options: LoadOptions) -> None:
    """Raise UserError for values that make no load."""
    if options.workers is not None and not 1 <= options.workers <= _MOST_WORKERS:
        raise UserError(f"--workers {options.workers}: must be from 1 to {_MOST_WORKERS}")
    if not 0 < options.timeout_s < 1e8:
        raise UserError(f"--timeout {options.timeout_s:g}: must be a number of seconds above 0")
    if not 0 <= options.retries <= 100:
        raise UserError(f"--retries {options.retries}: must be from 0 to 100")
    if not options.lag_bound_s > 0:
        raise UserError(f"--max-client-lag {options.lag_bound_s:g}: must be a number of seconds above 0")
    if options.api_key is not None and not (options.api_key.isascii() and options.api_key.isprintable()):
        raise UserError("--api-key: holds characters that an HTTP header cannot carry")
    for text in options.slos:
        parse_slo(text)
    parse_exclusion(options.warmup, "--warmup")
    parse_exclusion(options.cooldown, "--cooldown")


def _plan(options: LoadOptions, workload: Workload, schedule: Schedule) -> list[Share]:
    parse_endpoint(options.url, options.endpoint)
    if len(workload.requests) == 0:
        raise UserError(f"workload {workload.name}: has no request; nothing would be sent")
    if options.endpoint == "chat":
        as_messages(workload.requests[0])
    workers = default_workers(schedule.offered_rate) if options.workers is None else options.workers
    return split(workload.requests, schedule, workers)


class _Fleet:
    """The worker processes of one run."""

    def __init__(
        self,
        options: LoadOptions,
        shares: list[Share],
        output: Path,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._options = options
        self._shares = shares
        self._output = output
        self._on_progress = on_progress
        self._total = sum(len(share.first) + sum(map(len, share.later.values())) for share in shares)
        self._workers: dict[Pipe, multiprocessing.process.BaseProcess] = {}
        self._finished: set[Pipe] = set()
        self._reports: dict[Pipe, Report] = {}
        self._samples: deque[tuple[float, int]] = deque()
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=5000)
        self.aborted: str | None = None
        self.error_details: dict[str, str] = {}
        self.write_error: tuple[int, str] | None = None

    def start(self, workload: Workload, schedule: Schedule) -> int:
        """Start all, wait until each is ready, agree on a start; its CLOCK_MONOTONIC ns."""
        header = {
            "workload": workload.name,
            "seed": workload.seed,
            "arrival": schedule.spec,
            "workers": len(self._shares),
            "start_ns": 0,
        }
        create_records(self._output, header)
        for share in self._shares:
            process, pipe = start_worker(share, self._options, self._output)
            self._workers[pipe] = process
        for pipe in self._workers:
            message = self._receive(pipe)
            if not isinstance(message, Ready):
                raise LoadGeneratorError(_crash_text(message))
        at_once = sum(_due_at_start(share) for share in self._shares)
        lead_s = _START_LEAD_S + min(2.0, _START_LEAD_PER_CONNECTION_S * at_once)
        start_ns = time.monotonic_ns() + int(lead_s * 1e9)
        create_records(self._output, header | {"start_ns": start_ns})
        for pipe in self._workers:
            with contextlib.suppress(OSError):
                pipe.send(Start(start_ns))
        return start_ns

    def watch(self, cancel: threading.Event) -> bool:
        """Until all have finished; whether they were cancelled before."""
        cancelled_at: float | None = None
        shown_at = 0.0
        while pending := [pipe for pipe in self._workers if pipe not in self._finished]:
            for pipe in wait(pending, timeout=0.05):
                assert isinstance(pipe, Pipe)
                self._take(pipe, self._receive(pipe))
            now = time.monotonic()
            if cancelled_at is None and (cancel.is_set() or self.write_error or self.aborted):
                cancelled_at = now
                self._cancel_all()
            if cancelled_at is not None and now - cancelled_at > _CANCEL_LIMIT_S:
                raise LoadGeneratorError("a worker of the load generator did not end when told to; it was killed")
            if self._on_progress is not None and now - shown_at >= _PROGRESS_INTERVAL_S:
                shown_at = now
                self._on_progress(self._progress(now))
        if self._on_progress is not None:
            self._on_progress(self._progress(time.monotonic()))
        return cancel.is_set() and cancelled_at is not None

    def close(self) -> None:
        """Leave no process: those that still run are told to end, and killed when they do not."""
        self._cancel_all()
        deadline = time.monotonic() + (2.0 if len(self._finished) < len(self._workers) else _CANCEL_LIMIT_S)
        for pipe, process in self._workers.items():
            while process.is_alive() and time.monotonic() < deadline:
                # Its last words, which nobody wants, must not fill the pipe that it waits on.
                with contextlib.suppress(EOFError, OSError):
                    if pipe.poll(0.02):
                        pipe.recv()
                process.join(0.01)
            if process.is_alive():
                process.kill()
            process.join()
            pipe.close()
            process.close()

    def _cancel_all(self) -> None:
        for pipe in self._workers:
            if pipe not in self._finished:
                with contextlib.suppress(OSError):
                    pipe.send(Cancel())

    def _receive(self, pipe: Pipe) -> object:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process = self._workers[pipe]
            process.join(2.0)
            code = process.exitcode
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with status {code}"
            raise LoadGeneratorError(
                f"a worker of the load generator {how}; records until then are in {self._output}"
            ) from None

    def _take(self, pipe: Pipe, message: object) -> None:
        if isinstance(message, Report):
            now = time.monotonic()
            self._reports[pipe] = message
            self._ttfts.extend((now, ttft) for ttft in message.ttft_s)
        elif isinstance(message, Finished):
            self._finished.add(pipe)
            self.aborted = self.aborted or message.aborted
            self.write_error = self.write_error or message.write_error
            for cause, detail in message.error_details.items():
                self.error_details.setdefault(cause, detail)
        else:
            raise LoadGeneratorError(_crash_text(message))

    def _progress(self, now: float) -> Progress:
        reports = self._reports.values()
        self._samples.append((now, sum(report.tokens for report in reports)))
        while self._samples[0][0] < now - _WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()
        while self._ttfts and self._ttfts[0][0] < now - _WINDOW_S:
            self._ttfts.popleft()
        (then, before), (_, tokens) = self._samples[0], self._samples[-1]
        return Progress(
            completed=sum(report.completed for report in reports),
            failed=sum(report.failed for report in reports),
            in_flight=sum(report.in_flight for report in reports),
            total=None if self._shares[0].duration_ns is not None and self._shares[0].times_ns is None else self._total,
            output_tokens_per_s=(tokens - before) / (now - then) if now > then else None,
            ttft_p50_s=float(np.median([ttft for _, ttft in self._ttfts])) if self._ttfts else None,
        )


def _due_at_start(share: Share) -> int:
    """Requests that a worker sends in its first moments, each over a connection of its own."""
    if share.times_ns is None:
        return share.concurrency or 1
    return int(np.searchsorted(share.times_ns, 10_000_000, side="right"))


def _crash_text(message: object) -> str:
    text = message.text.strip().splitlines()[-1] if isinstance(message, Crashed) else repr(message)
    return f"a worker of the load generator failed: {text}"
