"""The load generator outlives the server that it measures, and says what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from reports.directory import load_results
from tests.faults.harness import TINY, in_namespace, namespaces, serve, wait_until
from tests.integration.serving import Server, gone


def load_run(server: Server, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchctl", "run", "--url", server.url, "--output", str(output)]
    command += ["--workload", "synthetic:input_len=8,output_len=2000", "--num-requests", "40", "--concurrency", "8"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def num_running(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return float(next(line for line in lines if line.startswith("benchctl:num_requests_running{")).split()[-1])


@pytest.mark.parametrize("module", ["server.worker", pytest.param("server.api", marks=pytest.mark.nightly)])
def test_a_server_that_dies_under_load_is_recorded(tmp_path: Path, module: str) -> None:
    with serve(tmp_path, *TINY) as server:
        server.wait_ready()
        children = server.children()
        run = load_run(server, tmp_path / "out")
        try:
            wait_until(lambda: num_running(server) == 8, timeout_s=60)
            os.kill(server.child(module), signal.SIGKILL)
            output, _ = run.communicate(timeout=60)
        finally:
            run.kill()
        assert run.returncode == 1, output
        assert "Traceback" not in output
        [result] = load_results(tmp_path / "out").results
        assert result.status == "failed"
        expected = "The engine died: worker-0 was killed by SIGKILL" if module == "server.worker" else "connection"
        assert expected in (result.reason or "")
        assert gone(children)


_MEASURE = """
import re, subprocess, sys
serve = [sys.executable, "-m", "benchctl", "mock", "--port", "0"]
run = [sys.executable, "-m", "benchctl", "run", "-w", "synthetic:input_len=4,output_len=64", "-n", "300"]
with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as mock:
    try:
        url = next(match.group() for line in mock.stdout if (match := re.search(r"http://[0-9.:]+", line)))
        done = subprocess.run([*run, "--concurrency", "20", "--url", url, "--output", "/mnt/out"])
    finally:
        mock.kill()
sys.exit(done.returncode)
"""


@namespaces
def test_a_disk_that_fills_up_under_load_is_said_and_what_was_written_stays() -> None:
    steps = ("ip link set lo up", "mount -t tmpfs -o size=40k none /mnt")
    command = in_namespace(*steps, command=(sys.executable, "-c", _MEASURE))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2), done.stderr
    assert "the disk is full" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
