"""Load runs against one server: a target brought up once, any number of loads on it, a result file for each."""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from benchctl import targets
from benchctl.loadgen.options import LoadOptions, LoadOutcome
from benchctl.loadgen.run import run_load
from benchctl.loadgen.verdict import ran_out, verdict
from benchctl.matrix.interrupts import Interrupts
from benchctl.matrix.plan import arrival_label, traffic_seed
from benchctl.matrix.progress import Progress
from benchctl.matrix.traffic import Traffic, TrafficFactory
from benchctl.output_lock import OutputLock
from benchctl.provenance import collect_provenance, utc_now
from benchctl.targets import RunningServer, TargetError
from benchctl.telemetry import Telemetry
from reports.directory import ResultSet
from reports.results import explain_os_error, result_name, write_index, write_result
from reports.schema import CellConfig, CellResult, MatrixIndex, Status, config_digest
from server.errors import UserError
from workloads.base import OnRead

_GENERATED = frozenset({"synthetic", "sharegpt-like"})
"""Workloads that have as many requests as one asks for."""
_REQUESTS_PER_USER_S = 20
_MOST_FOR_USERS = 100_000


class LoadSession:
    """Use as a context manager: entering brings the target up, leaving stops what we started.

    `config` lacks its arrival, and for a URL may lack the model (then the endpoint's only one is taken). `options` lack
    URL and model. Raises UserError when an endpoint that is not ours does not answer, or another command writes into
    `output`.
    """

    def __init__(
        self,
        config: CellConfig,
        options: LoadOptions,
        output: Path,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        on_read: OnRead | None = None,
    ) -> None:
        self.config = config
        self.output = output
        self.results: list[CellResult] = []
        self.description = ""
        """What the whole session found; goes into its index."""
        self.over = False
        """No further load can be measured: the server is gone, or the load generator failed."""
        self._options = options
        self._on_progress = on_progress
        self._traffic = TrafficFactory(on_read)
        self._interrupts = Interrupts()
        self._lock = OutputLock(output)
        self._server: RunningServer | None = None
        self._problem: TargetError | None = None
        self._prepared: tuple[CellConfig, Traffic] | None = None
        self._made_output = False
        self._provenance = collect_provenance()

    @property
    def interrupted(self) -> bool:
        return self._interrupts.requested

    def __enter__(self) -> LoadSession:
        try:
            self._made_output = not self.output.exists()
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(explain_os_error(self.output, error)) from error
        self._lock.__enter__()
        self._interrupts.__enter__()
        try:
            self._server = targets.launch(self.config, log_dir=self.output / "logs")
            self.config = msgspec.structs.replace(self.config, model=self.config.model or self._server.model)
        except TargetError as error:
            if self.config.engine == "url":
                self.__exit__(None, None, None)
                raise UserError(error.reason) from error
            self._problem, self.over = error, True
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._server is not None:
                self._server.stop()
        finally:
            self._interrupts.__exit__()
            self._lock.__exit__(kind, error, traceback)
            if self._made_output and not self.results:
                with contextlib.suppress(OSError):  # a log may be in it
                    self.output.rmdir()

    def prepare(self, arrival: dict[str, Any], *, reseed: bool = False) -> None:
        """Make the traffic of the first load, as `run` gets it, before a server is started for it. Raises UserError."""
        config = self._config_of(arrival, reseed)
        self._prepared = config, self._traffic.build(config)

    def run(self, arrival: dict[str, Any], *, reseed: bool = False) -> CellResult:
        """Replay the workload with this arrival process, and write the result. Raises UserError for bad input.

        `reseed`: with a seed of the arrival's own, as one of several loads on the server must, or it would find the
        prompts of the one before in its prefix cache.
        """
        config = self._config_of(arrival, reseed)
        parts = [config.engine, config.model, config.mode, config.attention_backend, config.workload.get("name")]
        cell_id = "/".join([*(part for part in parts if part), arrival_label(arrival)])
        prepared, self._prepared = self._prepared, None
        traffic = prepared[1] if prepared and prepared[0] == config else self._traffic.build(config)
        if self._server is None:
            assert self._problem is not None
            problem = self._problem
            result = self._result(cell_id, config, traffic, problem.status, problem.reason)
            result.log_tail = problem.log_tail
        else:
            result = self._measure(cell_id, config, traffic, self._server)
        self.results.append(result)
        write_result(result, self.output)
        return result

    def result_set(self) -> ResultSet:
        """All results so far, with their index written beside them."""
        names = [result_name(result.cell_id) for result in self.results]
        index = MatrixIndex(
            suite="run",
            suite_digest=hashlib.sha256("".join(r.config_digest for r in self.results).encode()).hexdigest(),
            cells=list(dict.fromkeys(names)),
            provenance=self._provenance,
            interrupted=self.interrupted,
            description=self.description,
        )
        write_index(index, self.output)
        return ResultSet(title="run", results=self.results, index=index)

    def _config_of(self, arrival: dict[str, Any], reseed: bool) -> CellConfig:
        seed = self.config.seed
        return msgspec.structs.replace(
            self.config,
            arrival=arrival,
            workload=sized_workload(self.config.workload, arrival),
            seed=traffic_seed(seed, arrival_label(arrival)) if reseed else seed,
        )

    def _measure(self, cell_id: str, config: CellConfig, traffic: Traffic, server: RunningServer) -> CellResult:
        records = self.output / (result_name(cell_id).removesuffix(".json") + ".records")
        options = msgspec.structs.replace(
            self._options, url=server.url, model=server.model, endpoint=config.endpoint, slos=tuple(config.slos)
        )
        cancel = threading.Event()
        outcome: LoadOutcome | None = None
        failure: str | None = None
        began = time.monotonic()
        with Telemetry(pid=server.pid, url=server.url) as telemetry:
            try:
                with self._interrupts.graceful(cancel):
                    outcome = run_load(
                        options,
                        traffic.workload,
                        traffic.schedule,
                        output=records,
                        on_progress=self._on_progress,
                        cancel=cancel,
                        forced_lengths=traffic.forced_lengths,
                    )
            except UserError as error:
                if error.exit_code == UserError.exit_code:
                    raise
                failure = str(error)
        metrics = outcome.metrics if outcome else None
        self.over = outcome is None or outcome.aborted is not None or server.exit_code() is not None
        status, reason = verdict(outcome, failure, server.exit_code(), interrupted=self.interrupted)
        short = ran_out(config.arrival, traffic.info.requests, metrics) if metrics else None
        if status == "ok" and short:
            reason = f"{short}; {reason}" if reason else short
        result = self._result(cell_id, config, traffic, status, reason)
        result.metrics = metrics
        result.duration_s = time.monotonic() - began
        result.log_tail = server.log_tail() if status == "failed" else []
        result.server = server.info
        result.startup = [server.startup] if server.startup else []
        result.telemetry, result.server_metrics = telemetry.telemetry, telemetry.server_metrics
        result.raw_records = records.name if records.is_file() else None
        return result

    def _result(
        self, cell_id: str, config: CellConfig, traffic: Traffic, status: Status, reason: str | None
    ) -> CellResult:
        return CellResult(
            cell_id=cell_id,
            config=config,
            config_digest=config_digest(config),
            status=status,
            reason=reason,
            workload=traffic.info,
            provenance=msgspec.structs.replace(self._provenance, started_at=utc_now()),
        )


def sized_workload(workload: dict[str, Any], arrival: dict[str, Any]) -> dict[str, Any]:
    """The workload with enough requests for the arrival's duration, where it can have any number and none is stated.

    For a rate: its expectation and six standard deviations (none for an `exact_rate`). For users: 20 requests a second
    each, 100,000 at most.
    """
    duration_s = arrival.get("duration_s")
    if "num_requests" in workload or workload.get("name") not in _GENERATED:
        return workload
    if not isinstance(duration_s, int | float) or duration_s <= 0:
        return workload
    rate, users = arrival.get("rate"), arrival.get("concurrency")
    if isinstance(rate, int | float) and rate > 0:
        expected = rate * duration_s
        if arrival.get("exact_rate") is True:
            return {**workload, "num_requests": math.ceil(expected)}
        return {**workload, "num_requests": math.ceil(expected + 6 * math.sqrt(expected) + 16)}
    if isinstance(users, int) and users > 0:
        wanted = math.ceil(users * (1 + _REQUESTS_PER_USER_S * duration_s))
        return {**workload, "num_requests": max(users, min(wanted, _MOST_FOR_USERS))}
    return workload
