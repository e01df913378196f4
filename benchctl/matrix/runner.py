"""Runs a plan: every server started once for all its cells, every result written as soon as its cell ends."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from benchctl import targets
from benchctl.loadgen.options import LoadOutcome
from benchctl.loadgen.verdict import ran_out, verdict
from benchctl.matrix.interrupts import Interrupts
from benchctl.matrix.plan import Cell, Plan, ServerPlan
from benchctl.matrix.progress import Progress
from benchctl.matrix.suite import StartKind, Suite
from benchctl.matrix.traffic import Traffic
from benchctl.output_lock import OutputLock
from benchctl.provenance import collect_provenance, utc_now
from benchctl.targets import RunningServer, TargetError, TargetFailed
from benchctl.targets.base import slug
from benchctl.telemetry import Telemetry
from reports.directory import ResultSet
from reports.results import explain_os_error, read_result, result_name, write_index, write_result
from reports.schema import CellResult, LoadMetrics, MatrixIndex, StartupReport, Status, WorkloadInfo
from server.errors import UserError


class Observer(Protocol):
    """Hears how the matrix goes, in order; shows it to a person."""

    def on_plan(self, plan: Plan, reused: list[CellResult]) -> None: ...

    def on_start(self, server: ServerPlan, kind: str) -> None: ...

    def on_started(self, server: ServerPlan, report: StartupReport | None) -> None: ...

    def on_cell(self, cell: Cell, traffic: Traffic) -> None: ...

    def on_progress(self, cell: Cell, progress: Progress) -> None: ...

    def on_result(self, result: CellResult) -> None: ...


class Replay(Protocol):
    """Replays a cell's traffic against a server and returns what the client measured."""

    def __call__(
        self,
        cell: Cell,
        traffic: Traffic,
        server: RunningServer,
        *,
        records: Path,
        on_progress: Callable[[Progress], None],
        cancel: threading.Event,
    ) -> LoadOutcome: ...


class MatrixRunner:
    """One run of a plan into an output directory.

    `resume`: results in the directory that are `ok` and whose configuration, prompts, arrival times and kinds of timed
    starts are the same are kept as they are.
    """

    def __init__(
        self,
        plan: Plan,
        traffic: dict[str, Traffic],
        output: Path,
        observer: Observer,
        replay: Replay,
        *,
        resume: bool = False,
        launch: Callable[..., RunningServer] = targets.launch,
    ) -> None:
        self.plan = plan
        self.output = output
        self._traffic = traffic
        self._observer = observer
        self._resume = resume
        self._replay = replay
        self._launch_target = launch
        self._provenance = collect_provenance()
        self._results: dict[str, CellResult] = {}
        self._interrupts = Interrupts()
        self.interrupted = False

    def run(self) -> ResultSet:
        """Run every cell that has no result yet; `interrupted` says whether a signal ended the run early.

        Raises UserError when the output directory cannot be written (at the start, or later when the disk fills;
        results written until then stay) or another command writes into it. No server survives, whichever way it ends.
        """
        self._make_output()
        with OutputLock(self.output):
            return self._run_plan()

    def _run_plan(self) -> ResultSet:
        if self._resume:
            self._read_finished()
        self._remove_stale()
        index = self._write_index()
        self._observer.on_plan(self.plan, list(self._results.values()))
        with self._interrupts:
            try:
                for server in self.plan.servers:
                    if any(cell.id not in self._results for cell in server.cells):
                        self._run_server(server)
                    if self._interrupts.requested:
                        break
            except KeyboardInterrupt:
                self._interrupts.requested = True
        self.interrupted = self._interrupts.requested
        if self.interrupted:
            index = self._write_index()
        cells = self.plan.cells
        return ResultSet(
            title=self.plan.suite.name,
            results=[self._results[cell.id] for cell in cells if cell.id in self._results],
            index=index,
            missing=[result_name(cell.id) for cell in cells if cell.id not in self._results],
        )

    def _make_output(self) -> None:
        try:
            (self.output / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(explain_os_error(self.output, error)) from error

    def _write_index(self) -> MatrixIndex:
        index = MatrixIndex(
            suite=self.plan.suite.name,
            suite_digest=self.plan.digest,
            cells=[result_name(cell.id) for cell in self.plan.cells],
            provenance=self._provenance,
            interrupted=self.interrupted,
            description=self.plan.suite.description.strip(),
            reference=self.plan.reference,
        )
        write_index(index, self.output)
        return index

    def _read_finished(self) -> None:
        for cell in self.plan.cells:
            with contextlib.suppress(UserError):  # a result that cannot be read is measured again
                result = read_result(self.output / result_name(cell.id))
                # A file of prompts may have changed under the same configuration.
                same = result.config_digest == cell.digest and _sent(result.workload) == _sent(
                    self._traffic[cell.id].info
                )
                if result.status == "ok" and same and self._started_alike(cell, result):
                    self._results[cell.id] = result

    def _started_alike(self, cell: Cell, result: CellResult) -> bool:
        """Whether the result has the start-up times that the suite asks for now."""
        if cell.config.engine == "url" or not result.startup:
            return True  # nothing was timed, and nothing would be
        wanted = _start_kinds(self.plan.suite)
        kinds = [report.kind for report in result.startup]
        # Beyond those, a server that died was started again, warm; of no warm start asked for, they cannot be told.
        return kinds == wanted or ("warm" in wanted and kinds[: len(wanted)] == wanted)

    def _remove_stale(self) -> None:
        """Results of an earlier run must not stand for cells that this one does not reach."""
        for cell in self.plan.cells:
            if cell.id not in self._results:
                for path in (self.output / result_name(cell.id), self._records_path(cell)):
                    try:
                        path.unlink(missing_ok=True)
                    except OSError as error:
                        raise UserError(explain_os_error(path, error)) from error

    def _records_path(self, cell: Cell) -> Path:
        return self.output / (result_name(cell.id).removesuffix(".json") + ".records")

    def _run_server(self, plan: ServerPlan) -> None:
        starts: list[StartupReport] = []
        waiting = [cell for cell in plan.cells if cell.id not in self._results]
        with contextlib.ExitStack() as stack:
            caches = _make_caches()
            stack.callback(shutil.rmtree, caches, ignore_errors=True)
            try:
                server = self._start(plan, caches, starts)
                stack.callback(lambda: server.stop())  # whichever is up at the end
                for cell in waiting:
                    if server.exit_code() is not None:
                        server = self._launch(plan, "warm", caches, starts)
                    self._run_cell(cell, server, starts)
                    if self._interrupts.requested:
                        return
            except TargetError as error:
                for cell in waiting:
                    if cell.id not in self._results:
                        self._finish(cell, error.status, error.reason, log_tail=error.log_tail, startup=starts)

    def _start(self, plan: ServerPlan, caches: Path, starts: list[StartupReport]) -> RunningServer:
        """Time every start that the suite asks for; the last one stays up."""
        kinds = _start_kinds(self.plan.suite)
        if plan.config.engine == "url":
            return self._launch(plan, "unknown", caches, starts)
        for kind in kinds[:-1]:
            self._launch(plan, kind, caches, starts).stop()
        return self._launch(plan, kinds[-1], caches, starts)

    def _launch(
        self, plan: ServerPlan, kind: Literal["cold", "warm", "unknown"], caches: Path, starts: list[StartupReport]
    ) -> RunningServer:
        if kind == "cold":
            shutil.rmtree(caches, ignore_errors=True)
            caches.mkdir(mode=0o700)
        self._observer.on_start(plan, kind)
        try:
            server = self._launch_target(
                plan.config,
                log_dir=self.output / "logs",
                cold_caches=None if plan.config.engine == "url" else caches,
                timeout_s=self.plan.suite.start_timeout_s,
                log_name=f"{slug(plan.name)}-{kind}-{len(starts)}.log",
            )
        except UserError as error:  # of this server alone; the others may be well
            raise TargetFailed(str(error)) from error
        if server.startup is not None:
            if kind != "unknown":  # eager fills no cache, and yet its second start finds all that the first one left
                server.startup.kind = kind
            starts.append(server.startup)
        self._observer.on_started(plan, server.startup)
        return server

    def _run_cell(self, cell: Cell, server: RunningServer, starts: list[StartupReport]) -> None:
        traffic = self._traffic[cell.id]
        self._observer.on_cell(cell, traffic)
        cancel, late = threading.Event(), threading.Event()
        records = self._records_path(cell)

        def expire() -> None:
            late.set()
            cancel.set()

        timer = threading.Timer(self.plan.suite.cell_timeout_s, expire)
        timer.daemon = True
        began = time.monotonic()
        outcome: LoadOutcome | None = None
        problem: str | None = None
        trace: list[str] = []
        telemetry = Telemetry(pid=server.pid, url=server.url)
        with telemetry:
            timer.start()
            try:
                with self._interrupts.graceful(cancel):
                    outcome = self._replay(
                        cell,
                        traffic,
                        server,
                        records=records,
                        on_progress=lambda progress: self._observer.on_progress(cell, progress),
                        cancel=cancel,
                    )
            except UserError as error:
                problem = str(error)
            except Exception as error:  # a defect in one cell must not cost the hours of the others
                problem = f"internal error: {type(error).__name__}: {error}"
                trace = traceback.format_exc().splitlines()
            finally:
                timer.cancel()
        metrics = outcome.metrics if outcome else None
        status, reason = verdict(
            outcome,
            problem,
            server.exit_code(),
            interrupted=self._interrupts.requested,
            late_s=self.plan.suite.cell_timeout_s if late.is_set() else None,
        )
        short = ran_out(cell.config.arrival, traffic.info.requests, metrics) if metrics else None
        if status == "ok" and short:
            reason = f"{short}; {reason}" if reason else short
        self._finish(
            cell,
            status,
            reason,
            log_tail=trace or (server.log_tail() if status == "failed" else []),
            startup=starts,
            metrics=metrics,
            server=server,
            telemetry=telemetry,
            records=records if records.is_file() else None,
            duration_s=time.monotonic() - began,
        )
        if outcome is not None and outcome.server_gone:
            server.stop()  # one that has not ended yet would take the next cell with it

    def _finish(
        self,
        cell: Cell,
        status: Status,
        reason: str | None,
        *,
        log_tail: list[str],
        startup: list[StartupReport],
        metrics: LoadMetrics | None = None,
        server: RunningServer | None = None,
        telemetry: Telemetry | None = None,
        records: Path | None = None,
        duration_s: float | None = None,
    ) -> None:
        result = CellResult(
            cell_id=cell.id,
            config=cell.config,
            config_digest=cell.digest,
            status=status,
            reason=reason,
            log_tail=log_tail,
            workload=self._traffic[cell.id].info,
            metrics=metrics,
            startup=list(startup),
            server=server.info if server else None,
            telemetry=telemetry.telemetry if telemetry else {},
            server_metrics=telemetry.server_metrics if telemetry else {},
            provenance=msgspec.structs.replace(self._provenance, started_at=utc_now()),
            raw_records=records.name if records else None,
            duration_s=duration_s,
        )
        with self._interrupts.shield():
            write_result(result, self.output)
            self._results[cell.id] = result
            self._observer.on_result(result)


def _start_kinds(suite: Suite) -> list[StartKind]:
    """The timed starts of every server, in order."""
    return [kind for kind in suite.starts for _ in range(suite.start_repeats)]


def _sent(info: WorkloadInfo | None) -> tuple[str, str | None] | None:
    return None if info is None else (info.digest, info.schedule_digest)


def _make_caches() -> Path:
    """A private directory for compiler caches that are to be cold."""
    try:
        return Path(tempfile.mkdtemp(prefix="benchctl-caches-"))
    except OSError as error:
        raise UserError(explain_os_error(Path(tempfile.gettempdir()), error)) from error
