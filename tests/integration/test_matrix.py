"""`benchctl matrix` from the command line against the real server: results, resuming, Ctrl-C, a server that dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reports.directory import load_results
from reports.schema import CellResult
from tests.integration.mocking import running_mock
from tests.integration.serving import START_TIMEOUT_S, start_server
from tests.unit.reports.published_schema import assert_published

SUITE = """
models = ["tiny"]
modes = ["eager"]
backends = ["TORCH_SDPA", "FLASH_ATTN"]
starts = ["cold"]
[server]
max_num_seqs = 8
max_model_len = 256
num_gpu_blocks_override = 128
device = "cpu"
[client]
lag_bound_s = 60
[[loads]]
workload = { name = "synthetic", num_requests = 6, input_len = 16, output_len = 8 }
arrivals = [{ name = "concurrency", concurrency = 2 }, { name = "burst" }]
"""
# Long enough to be interrupted: a token takes milliseconds, the whole load would take many minutes.
LONG = ["loads.0.workload.num_requests=5000", "loads.0.workload.output_len=200", 'backends=["TORCH_SDPA"]']


class Matrix:
    """`benchctl matrix` with the suite above; every process that comes of it carries a mark in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out"
        self.suite = folder / "suite.toml"
        self.suite.write_text(SUITE)
        self.log = folder / "stdout"
        self.mark = f"BENCHCTL_TEST_MARK={uuid.uuid4()}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *assignments: str, resume: bool = False) -> None:
        command = [sys.executable, "-m", "benchctl", "matrix", "--suite", str(self.suite), "-o", str(self.output)]
        command += ["--resume"] if resume else []
        for assignment in assignments:
            command += ["--set", assignment]
        name, _, value = self.mark.partition("=")
        environment = {**os.environ, name: value, "COLUMNS": "300"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(START_TIMEOUT_S)

    def run(self, *assignments: str, resume: bool = False) -> int:
        self.start(*assignments, resume=resume)
        return self.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def results(self) -> list[CellResult]:
        return load_results(self.output).results

    def processes(self) -> dict[int, bytes]:
        """Command lines of the living processes with the mark."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
        return found

    def all_gone(self) -> bool:
        deadline = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.processes()


@pytest.fixture
def matrix(tmp_path: Path) -> Iterator[Matrix]:
    made = Matrix(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)


def test_a_whole_matrix_and_its_resumption(matrix: Matrix) -> None:
    assert matrix.run() == 0, matrix.text()
    assert matrix.all_gone()
    assert assert_published(matrix.output) == 5
    results = matrix.results()
    assert [(result.status, result.config.attention_backend) for result in results] == [
        *[("ok", "TORCH_SDPA")] * 2,
        *[("unsupported", "FLASH_ATTN")] * 2,
    ]
    assert "CUDA" in str(results[2].reason)
    for result in results[:2]:
        assert result.metrics is not None
        assert (result.metrics.completed, result.metrics.failed) == (6, 0)
        assert result.metrics.throughput.output_tokens == 48
        assert (result.metrics.throughput.output_tokens_per_s or 0) > 0
        assert (result.metrics.ttft_s.percentiles["p50"] or 0) > 0
        (start,) = result.startup
        assert start.kind == "cold"
        assert 0 < (start.to_healthy_s or 0) < (start.to_first_token_s or 0)
        assert abs(start.unaccounted_s or 0) < 0.05 * (start.to_healthy_s or 0) + 0.05
        assert {"imports", "spawn"} <= {phase.name for phase in start.phases}
        assert result.server is not None
        assert (result.server.mode, result.server.attention_backend) == ("eager", "TORCH_SDPA")
        assert (result.server.num_blocks, result.server.max_model_len) == (128, 256)
        assert result.server.api_server_count == 1
        assert result.server_metrics["benchctl:num_requests_running"]
        assert result.telemetry["server.rss_bytes"]
        assert result.raw_records is not None
        assert (matrix.output / result.raw_records).stat().st_size > 0
    assert results[0].workload is not None
    assert results[0].workload.forced_lengths
    for name in ("report.html", "report.md", "report.csv"):
        assert (matrix.output / name).stat().st_size > 0
    assert "2 unsupported" in matrix.text()

    before = {path.name: path.stat().st_mtime_ns for path in matrix.output.glob("*TORCH_SDPA*.json")}
    assert matrix.run(resume=True) == 0, matrix.text()
    after = {path.name: path.stat().st_mtime_ns for path in matrix.output.glob("*TORCH_SDPA*.json")}
    assert before == after, "finished cells are kept as they are"
    assert "2 kept from before" in matrix.text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(matrix: Matrix, number: signal.Signals) -> None:
    matrix.start(*LONG)
    matrix.wait_for(lambda: "replaying" in matrix.text())
    time.sleep(1.0)
    assert matrix.process is not None
    matrix.process.send_signal(number)
    assert matrix.wait() == 130, matrix.text()
    assert matrix.all_gone()
    (result,) = matrix.results()
    assert result.status == "interrupted"
    assert result.metrics is not None
    assert load_results(matrix.output).index.interrupted  # type: ignore[union-attr]
    assert "go on with --resume" in matrix.text()
    assert "Traceback" not in matrix.text()


def test_a_server_that_dies_fails_its_cell_and_the_next_gets_another(matrix: Matrix) -> None:
    matrix.start(*LONG, "loads.0.arrivals.1.duration_s=1", "loads.0.arrivals.1.name=concurrency",
                 "loads.0.arrivals.1.concurrency=1")  # fmt: skip
    matrix.wait_for(lambda: "replaying" in matrix.text())
    time.sleep(0.5)
    servers = [pid for pid, command in matrix.processes().items() if b"\0serve\0" in command]
    assert len(servers) == 1
    os.kill(servers[0], signal.SIGKILL)
    assert matrix.wait() == 1, matrix.text()
    assert matrix.all_gone()
    first, second = matrix.results()
    assert (first.status, first.reason) == ("failed", "the server was killed by signal 9 during the run")
    assert second.status == "ok", second.reason
    assert [start.kind for start in second.startup] == ["cold", "warm"]


def test_an_endpoint_that_others_run(matrix: Matrix, tmp_path: Path) -> None:
    flags = ["--enforce-eager", "--device", "cpu", "--num-gpu-blocks-override", "64", "--max-model-len", "256"]
    url = ['engines=["url"]', 'models=["tiny"]', 'only=["*/burst"]']
    with start_server(tmp_path, "tiny", *flags) as server:
        server.wait_ready()
        assert matrix.run(*url, f'url="{server.url}"') == 0, matrix.text()
        (result,) = matrix.results()
        assert (result.status, result.startup, result.config.mode) == ("ok", [], None)
        assert result.metrics is not None
        assert result.metrics.completed == 6
        assert server.process.poll() is None
    assert matrix.run(*url, f'url="{server.url}"') == 1
    (result,) = matrix.results()
    assert result.status == "failed"
    assert "does not answer" in str(result.reason)


ENDPOINT = ['engines=["url"]', 'models=["mock"]']


def test_an_endpoint_that_dies_before_the_end_fails_its_cell(matrix: Matrix) -> None:
    long = ["loads.0.workload.num_requests=60", "loads.0.workload.output_len=1", 'only=["*/concurrency-2"]']
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(running_mock(ttft_s=0.02))
        matrix.start(*ENDPOINT, *long, f'url="{mock.url}"')
        matrix.wait_for(lambda: mock.requests >= 10)
        stack.close()
        assert matrix.wait() == 1, matrix.text()
    (result,) = matrix.results()
    assert result.status == "failed"
    assert "takes no connections any more: Connection refused" in (result.reason or "")
    assert result.metrics is not None
    assert 0 < result.metrics.completed < 60


def test_a_reader_that_goes_costs_no_cell_and_no_report(matrix: Matrix) -> None:
    with running_mock() as mock:
        command = [sys.executable, "-m", "benchctl", "matrix", "--suite", str(matrix.suite), "-o", str(matrix.output)]
        for assignment in (*ENDPOINT, f'url="{mock.url}"'):
            command += ["--set", assignment]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            process.stdout.close()
            assert process.wait(timeout=120) == 0
    assert [result.status for result in matrix.results()] == ["ok", "ok"]
    assert (matrix.output / "report.html").is_file()


def test_bad_input_is_one_line(matrix: Matrix) -> None:
    assert matrix.run("server.max_model_len=9999999") == 2
    assert matrix.text().count("\n") == 1
    assert "model 'tiny' takes 1 to 4096 tokens" in matrix.text()
    assert not matrix.output.exists()
