"""The runner against servers and loads that are made up: order, starts, failures, resuming, signals, full disks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchctl.loadgen.options import LoadOutcome
from benchctl.matrix import runner as runner_module
from benchctl.matrix.plan import Cell, Plan, ServerPlan, plan_matrix
from benchctl.matrix.progress import Progress
from benchctl.matrix.runner import MatrixRunner
from benchctl.matrix.suite import load_suite
from benchctl.matrix.traffic import Traffic, TrafficFactory
from benchctl.targets import RunningServer, TargetFailed, UnsupportedTarget
from reports.directory import load_results
from reports.results import read_result, result_name
from reports.schema import CellConfig, CellResult, LoadMetrics, StartupReport
from server.errors import UserError
from tests.unit.reports import samples

SUITE = """
models = ["tiny"]
modes = ["eager", "compile"]
backends = ["TORCH_SDPA"]
[[loads]]
workload = { name = "synthetic", num_requests = 4, input_len = 8, output_len = 2 }
arrivals = [{ name = "burst" }, { name = "concurrency", concurrency = 2 }]
"""


class FakeServer(RunningServer):
    def __init__(self, kind: str) -> None:
        startup = StartupReport(kind=kind, to_healthy_s=1.0, to_first_token_s=1.1)  # type: ignore[arg-type]
        super().__init__(url="http://127.0.0.1:9", model="tiny", process=None, startup=startup, info=None)
        self.stopped = False
        self.code: int | None = None

    def exit_code(self) -> int | None:
        return self.code

    def log_tail(self, lines: int = 40) -> list[str]:
        return ["last words"]

    def stop(self, timeout_s: float = 20.0) -> None:
        self.stopped = True
        if self.code is None:
            self.code = 0


class World:
    """Launches and replays, with a record of both; tests replace `before_launch` and `load`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.servers: list[FakeServer] = []
        self.aborted: str | None = None
        self.server_gone = False
        self.before_launch: Callable[[CellConfig], None] = lambda config: None
        self.load: Callable[[Cell, FakeServer, threading.Event], LoadMetrics] = lambda *_: samples.load_metrics(1, 2)

    def launch(self, config: CellConfig, *, cold_caches: Path | None, log_name: str, **_: Any) -> FakeServer:
        assert cold_caches is not None
        assert all(server.stopped or server.code is not None for server in self.servers), "two servers at once"
        kind = "warm" if any(cold_caches.iterdir()) else "cold"
        self.events.append(f"{'warm' if '-warm-' in log_name else 'cold'} {config.mode}")
        assert kind == "cold" or "-warm-" in log_name
        self.before_launch(config)
        if config.mode == "compile":
            (cold_caches / "compiled").touch()
        self.servers.append(FakeServer(kind))
        return self.servers[-1]

    def replay(self, cell: Cell, traffic: Traffic, server: FakeServer, **rest: Any) -> LoadOutcome:
        self.events.append(cell.id.split("/", 2)[2])
        metrics = self.load(cell, server, rest["cancel"])
        return LoadOutcome(
            records=rest["records"],
            metrics=metrics,
            interrupted=False,
            aborted=self.aborted,
            server_gone=self.server_gone,
        )


class Silent:
    def __init__(self) -> None:
        self.results: list[CellResult] = []
        self.reused: list[CellResult] = []

    def on_plan(self, plan: Plan, reused: list[CellResult]) -> None:
        self.reused = reused

    def on_start(self, server: ServerPlan, kind: str) -> None: ...

    def on_started(self, server: ServerPlan, report: StartupReport | None) -> None: ...

    def on_cell(self, cell: Cell, traffic: Traffic) -> None: ...

    def on_progress(self, cell: Cell, progress: Progress) -> None: ...

    def on_result(self, result: CellResult) -> None:
        self.results.append(result)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    class NoTelemetry:
        telemetry: dict[str, list[float | None]] = {}  # noqa: RUF012
        server_metrics: dict[str, list[float | None]] = {}  # noqa: RUF012

        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(runner_module, "Telemetry", NoTelemetry)
    return World()


def make(world: World, output: Path, *assignments: str, resume: bool = False) -> tuple[MatrixRunner, Silent]:
    suite = output.parent / "suite.toml"
    suite.write_text(SUITE)
    plan = plan_matrix(load_suite(str(suite), assignments))
    silent = Silent()
    traffic = TrafficFactory().prepare(plan.cells)
    runner = MatrixRunner(plan, traffic, output, silent, world.replay, resume=resume, launch=world.launch)  # type: ignore[arg-type]
    return runner, silent


def test_each_server_starts_cold_then_warm_and_serves_all_its_cells(world: World, tmp_path: Path) -> None:
    runner, _ = make(world, tmp_path / "out", "start_repeats=2")
    results = runner.run()
    assert world.events == [
        *("cold eager", "cold eager", "warm eager", "warm eager"),
        *("eager/TORCH_SDPA/synthetic/burst", "eager/TORCH_SDPA/synthetic/concurrency-2"),
        *("cold compile", "cold compile", "warm compile", "warm compile"),
        *("compile/TORCH_SDPA/synthetic/burst", "compile/TORCH_SDPA/synthetic/concurrency-2"),
    ]
    assert all(server.stopped for server in world.servers)
    assert [result.status for result in results.results] == ["ok"] * 4
    assert [start.kind for start in results.results[0].startup] == ["cold", "cold", "warm", "warm"]
    again = load_results(tmp_path / "out")
    assert again.results == results.results
    assert again.missing == []


def test_a_failed_server_or_cell_does_not_end_the_run(world: World, tmp_path: Path) -> None:
    def refuse(config: CellConfig) -> None:
        if config.mode == "eager":
            raise UnsupportedTarget("needs a CUDA device", ["tail"])

    def load(cell: Cell, server: FakeServer, cancel: threading.Event) -> LoadMetrics:
        if cell.id.endswith("burst"):
            raise UserError("the load could not run")
        return samples.load_metrics(1, 2)

    world.before_launch, world.load = refuse, load
    runner, _ = make(world, tmp_path / "out")
    results = runner.run().results
    assert [result.status for result in results] == ["unsupported", "unsupported", "failed", "ok"]
    assert results[0].reason == "needs a CUDA device"
    assert results[0].metrics is None
    assert results[2].reason == "the load could not run"
    assert results[2].log_tail == ["last words"]


def test_a_server_that_dies_fails_its_cell_and_is_started_again(world: World, tmp_path: Path) -> None:
    def load(cell: Cell, server: FakeServer, cancel: threading.Event) -> LoadMetrics:
        if cell.id.endswith("eager/TORCH_SDPA/synthetic/burst"):
            server.code = -9
        return samples.load_metrics(1, 2)

    world.load = load
    results = make(world, tmp_path / "out", "starts=['cold']")[0].run().results
    assert [result.status for result in results] == ["failed", "ok", "ok", "ok"]
    assert results[0].reason == "the server was killed by signal 9 during the run"
    assert world.events[:4] == [
        "cold eager",
        "eager/TORCH_SDPA/synthetic/burst",
        "warm eager",
        "eager/TORCH_SDPA/synthetic/concurrency-2",
    ]


def test_a_server_that_is_gone_but_has_not_ended_yet_is_stopped(world: World, tmp_path: Path) -> None:
    def load(cell: Cell, server: FakeServer, cancel: threading.Event) -> LoadMetrics:
        world.server_gone = cell.id.endswith("eager/TORCH_SDPA/synthetic/burst")
        world.aborted = "is not healthy any more" if world.server_gone else None
        return samples.load_metrics(1, 2)

    world.load = load
    results = make(world, tmp_path / "out", "starts=['cold']")[0].run().results
    assert [result.status for result in results] == ["failed", "ok", "ok", "ok"]
    assert results[0].reason == "is not healthy any more"
    assert world.events[:3] == ["cold eager", "eager/TORCH_SDPA/synthetic/burst", "warm eager"]


def test_a_failing_restart_fails_the_cells_that_wait(world: World, tmp_path: Path) -> None:
    def load(cell: Cell, server: FakeServer, cancel: threading.Event) -> LoadMetrics:
        server.code = 1
        world.before_launch = fail
        return samples.load_metrics(1, 2)

    def fail(config: CellConfig) -> None:
        raise TargetFailed("the port is gone", ["trace"])

    world.load = load
    results = make(world, tmp_path / "out", "modes=['eager']")[0].run().results
    assert [(result.status, result.reason) for result in results] == [
        ("failed", "the server exited with status 1 during the run"),
        ("failed", "the port is gone"),
    ]


def test_resume_keeps_ok_cells_with_the_same_configuration(world: World, tmp_path: Path) -> None:
    def load(cell: Cell, server: FakeServer, cancel: threading.Event) -> LoadMetrics:
        if cell.id.endswith("eager/TORCH_SDPA/synthetic/burst"):
            raise UserError("not this time")
        return samples.load_metrics(1, 2)

    world.load = load
    make(world, tmp_path / "out")[0].run()
    world.load = lambda *_: samples.load_metrics(1, 2)
    world.events.clear()
    runner, silent = make(world, tmp_path / "out", "loads.0.arrivals.1.concurrency=2", resume=True)
    results = runner.run().results
    assert len(silent.reused) == 3
    assert world.events == ["cold eager", "warm eager", "eager/TORCH_SDPA/synthetic/burst"]
    assert [result.status for result in results] == ["ok"] * 4
    world.events.clear()
    make(world, tmp_path / "out", "server.max_num_seqs=3", resume=True)[0].run()
    assert len(world.events) == 8, "another configuration is another experiment"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], ["starts=['cold']"]),
        (["starts=['cold']"], []),
        ([], ["start_repeats=2"]),
        (["start_repeats=2"], []),
        (["start_repeats=2", "starts=['cold']"], ["starts=['cold']"]),
    ],
)
def test_resume_measures_again_when_other_starts_are_asked_for(
    world: World, tmp_path: Path, before: list[str], after: list[str]
) -> None:
    make(world, tmp_path / "out", "modes=['eager']", *before)[0].run()
    runner, silent = make(world, tmp_path / "out", "modes=['eager']", *after, resume=True)
    runner.run()
    assert silent.reused == []
    runner, silent = make(world, tmp_path / "out", "modes=['eager']", *after, resume=True)
    runner.run()
    assert len(silent.reused) == 2


def test_resume_keeps_a_cell_whose_server_had_to_be_started_again(world: World, tmp_path: Path) -> None:
    def load(cell: Cell, server: FakeServer, cancel: threading.Event) -> LoadMetrics:
        if cell.id.endswith("burst"):
            server.code = -9
        return samples.load_metrics(1, 2)

    world.load = load
    make(world, tmp_path / "out", "modes=['eager']")[0].run()
    runner, silent = make(world, tmp_path / "out", "modes=['eager']", resume=True)
    runner.run()
    assert [[start.kind for start in result.startup] for result in silent.reused] == [["cold", "warm", "warm"]]


def test_resume_measures_again_when_a_file_of_prompts_has_changed(world: World, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    workload = f"loads.0.workload={{ name = 'custom', path = '{prompts}' }}"
    prompts.write_text('{"prompt": "one", "max_tokens": 2}\n')
    make(world, tmp_path / "out", workload, "modes=['eager']")[0].run()
    runner, silent = make(world, tmp_path / "out", workload, "modes=['eager']", resume=True)
    runner.run()
    assert len(silent.reused) == 2
    prompts.write_text('{"prompt": "another", "max_tokens": 2}\n')
    runner, silent = make(world, tmp_path / "out", workload, "modes=['eager']", resume=True)
    runner.run()
    assert silent.reused == []


def test_a_second_run_into_the_same_directory_is_refused_while_the_first_one_writes(
    world: World, tmp_path: Path
) -> None:
    refusals: list[str] = []

    def load(*_: Any) -> LoadMetrics:
        with pytest.raises(UserError) as caught:
            make(World(), tmp_path / "out")[0].run()
        refusals.append(str(caught.value))
        return samples.load_metrics(1, 2)

    world.load = load
    results = make(world, tmp_path / "out")[0].run().results
    assert [result.status for result in results] == ["ok"] * 4
    assert len(refusals) == 4
    assert "another benchctl is writing its results here" in refusals[0]
    world.load = lambda *_: samples.load_metrics(1, 2)
    make(world, tmp_path / "out")[0].run()


def test_a_result_that_cannot_be_read_is_measured_again(world: World, tmp_path: Path) -> None:
    runner, _ = make(world, tmp_path / "out", "modes=['eager']")
    cells = runner.run().results
    (tmp_path / "out" / result_name(cells[0].cell_id)).write_text("{broken")
    runner, silent = make(world, tmp_path / "out", "modes=['eager']", resume=True)
    results = runner.run().results
    assert [result.cell_id for result in silent.reused] == [cells[1].cell_id]
    assert [result.status for result in results] == ["ok", "ok"]


def test_results_of_an_earlier_run_do_not_stand_for_cells_that_were_not_reached(world: World, tmp_path: Path) -> None:
    make(world, tmp_path / "out")[0].run()

    def interrupt(config: CellConfig) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    world.before_launch = interrupt
    runner, _ = make(world, tmp_path / "out")
    assert runner.run().results == []
    on_disk = load_results(tmp_path / "out")
    assert on_disk.results == []
    assert len(on_disk.missing) == 4


def test_a_signal_while_a_result_is_written_does_not_lose_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = make(world, tmp_path / "out")
    real = os.fsync
    calls = []

    def fsync(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:  # the index came first
            os.kill(os.getpid(), signal.SIGINT)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    results = runner.run()
    assert runner.interrupted
    assert [result.status for result in results.results] == ["ok"]
    assert load_results(tmp_path / "out").results == results.results


def test_a_defect_in_one_cell_does_not_cost_the_others(world: World, tmp_path: Path) -> None:
    def load(cell: Cell, server: FakeServer, cancel: threading.Event) -> LoadMetrics:
        if cell.id.endswith("burst"):
            raise ZeroDivisionError("oh")
        return samples.load_metrics(1, 2)

    world.load = load
    results = make(world, tmp_path / "out", "modes=['eager']")[0].run().results
    assert [result.status for result in results] == ["failed", "ok"]
    assert results[0].reason == "internal error: ZeroDivisionError: oh"
    assert any("in load" in line for line in results[0].log_tail)


def test_bad_input_of_one_server_fails_its_cells_alone(world: World, tmp_path: Path) -> None:
    def refuse(config: CellConfig) -> None:
        if config.mode == "eager":
            raise UserError("http://host serves a, b: say which with --model")

    world.before_launch = refuse
    results = make(world, tmp_path / "out")[0].run().results
    assert [result.status for result in results] == ["failed", "failed", "ok", "ok"]
    assert "say which" in str(results[0].reason)


def test_no_room_for_the_compile_caches(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdtemp(**_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner_module.tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(UserError, match="the disk is full"):
        make(world, tmp_path / "out")[0].run()


def test_the_first_signal_keeps_the_partial_cell(world: World, tmp_path: Path) -> None:
    def load(cell: Cell, server: FakeServer, cancel: threading.Event) -> LoadMetrics:
        os.kill(os.getpid(), signal.SIGINT)
        assert cancel.wait(10)
        return samples.load_metrics(1, 2)

    world.load = load
    before = signal.getsignal(signal.SIGINT)
    runner, _ = make(world, tmp_path / "out")
    results = runner.run()
    assert runner.interrupted
    assert [result.status for result in results.results] == ["interrupted"]
    assert results.results[0].metrics is not None
    assert len(results.missing) == 3
    assert world.servers[-1].stopped
    assert signal.getsignal(signal.SIGINT) is before
    on_disk = load_results(tmp_path / "out")
    assert on_disk.index is not None
    assert on_disk.index.interrupted
    assert on_disk.missing == results.missing


def test_a_signal_during_a_start_ends_the_run(world: World, tmp_path: Path) -> None:
    def interrupt(config: CellConfig) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    world.before_launch = interrupt
    runner, _ = make(world, tmp_path / "out")
    assert runner.run().results == []
    assert runner.interrupted


def test_a_cell_that_does_not_end_times_out(world: World, tmp_path: Path) -> None:
    def load(cell: Cell, server: FakeServer, cancel: threading.Event) -> LoadMetrics:
        assert cancel.wait(10)
        return samples.load_metrics(1, 2)

    world.load = load
    results = make(world, tmp_path / "out", "cell_timeout_s=0.05", "modes=['eager']")[0].run().results
    assert [result.status for result in results] == ["timeout", "timeout"]
    assert results[0].metrics is not None


def test_a_saturated_client_invalidates_and_no_success_fails(world: World, tmp_path: Path) -> None:
    def load(cell: Cell, server: FakeServer, cancel: threading.Event) -> LoadMetrics:
        metrics = samples.load_metrics(1, 2)
        if cell.id.endswith("burst"):
            metrics.client_saturated = True
        else:
            metrics.completed, metrics.failed, metrics.errors = 0, 4, {"http 503": 4}
        return metrics

    world.load = load
    results = make(world, tmp_path / "out", "modes=['eager']")[0].run().results
    assert [result.status for result in results] == ["invalid", "failed"]
    assert "client saturated" in str(results[0].reason)
    assert results[1].reason == "no request was completed: 4 × http 503"


def test_a_load_that_gave_up_is_a_failure_with_its_figures(world: World, tmp_path: Path) -> None:
    world.aborted = "the server does not take connections any more"
    (result, _) = make(world, tmp_path / "out", "modes=['eager']")[0].run().results
    assert (result.status, result.reason) == ("failed", world.aborted)
    assert result.metrics is not None


def test_a_full_disk_is_one_line_and_keeps_what_was_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, silent = make(world, tmp_path / "out")
    real = os.fsync

    def fsync(fd: int) -> None:
        if silent.results:
            raise OSError(28, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match="the disk is full; results written before are kept"):
        runner.run()
    monkeypatch.undo()
    assert world.servers[-1].stopped
    kept = [path.name for path in (tmp_path / "out").glob("benchctl*.json")]
    assert kept == [result_name(silent.results[0].cell_id)]
    assert read_result(tmp_path / "out" / kept[0]).status == "ok"
    assert not list((tmp_path / "out").glob(".*")), "no half-written file stays"


def test_an_output_below_a_file(world: World, tmp_path: Path) -> None:
    runner, _ = make(world, tmp_path / "out")
    (tmp_path / "file").touch()
    runner.output = tmp_path / "file" / "out"
    with pytest.raises(UserError, match="file/out"):
        runner.run()
