"""What is recorded beside a result: machine, software, and samples of the server's processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchctl.provenance import collect_provenance, git_state, mask_secrets
from benchctl.telemetry import MAX_SERIES, CpuUse, SeriesTable, Telemetry, parse_metrics, tree_use
from server.api.metrics import Metrics

# As prometheus_client writes it: counters are declared with their suffix, their creation times as gauges.
PAGE = """# TYPE benchctl:num_requests_running gauge
benchctl:num_requests_running{model_name="m"} 3
# TYPE benchctl:prompt_tokens_total counter
benchctl:prompt_tokens_total{model_name="m"} 120
# TYPE benchctl:prompt_tokens_created gauge
benchctl:prompt_tokens_created{model_name="m"} 1.7e9
# TYPE benchctl:request_success_total counter
benchctl:request_success_total{finished_reason="stop",model_name="m"} 4
benchctl:request_success_total{finished_reason="length",model_name="m"} 5
# TYPE benchctl:ttft histogram
benchctl:ttft_bucket{le="+Inf"} 9
benchctl:ttft_count 9
benchctl:ttft_sum 1.5
"""


def test_provenance_of_this_machine() -> None:
    made = collect_provenance(["benchctl", "run", "--api-key", "secret"])
    assert made.command == ["benchctl", "run", "--api-key", "***"]
    assert made.cpu_count == len(os.sched_getaffinity(0))
    assert made.packages["torch"]
    assert made.started_at.endswith("+00:00")


def test_secrets_are_masked_in_both_spellings() -> None:
    argv = ["benchctl", "--api-key=abc", "--header", "Authorization: x", "--rate", "2"]
    assert mask_secrets(argv) == ["benchctl", "--api-key=***", "--header", "***", "--rate", "2"]


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    commit, dirty = git_state(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    assert dirty is False
    (tmp_path / "untracked").touch()
    assert git_state(tmp_path)[1] is False
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == (commit, True)


def test_metrics_page_becomes_gauges_and_counters() -> None:
    assert parse_metrics(PAGE) == {
        "benchctl:num_requests_running": 3.0,
        "benchctl:prompt_tokens_total": 120.0,
        "benchctl:request_success_total{finished_reason=stop}": 4.0,
        "benchctl:request_success_total{finished_reason=length}": 5.0,
    }
    with pytest.raises(ValueError):
        parse_metrics("<html>not metrics</html>")


def test_the_bundled_servers_own_page_is_read() -> None:
    text = Metrics("m").exposition()[0].decode()
    samples = parse_metrics(text)
    assert samples["benchctl:num_requests_running"] == 0.0
    assert samples["benchctl:generation_tokens_total"] == 0.0
    assert not [name for name in samples if "seconds_bucket" in name or name.endswith("_created")]


def test_series_have_equal_length_and_nulls_for_what_is_missing() -> None:
    table = SeriesTable()
    assert table.series() == {}
    table.add(0.0, {"a": 1.0})
    table.add(1.0, {"b": 2.0})
    assert table.series() == {"t": [0.0, 1.0], "a": [1.0, None], "b": [None, 2.0]}
    table.add(2.0, {f"x{number}": 0.0 for number in range(200)})
    assert len(table.series()) == MAX_SERIES + 1


def test_cpu_use_is_unknown_until_there_are_two_readings() -> None:
    use = CpuUse()
    assert use.cores(1.0) is None
    time.sleep(0.001)
    assert use.cores(1.0) == 0.0
    assert use.cores(0.5) is None, "a counter that went back says nothing"
    assert use.cores(None) is None


def test_tree_use_counts_descendants() -> None:
    command = [sys.executable, "-c", "import subprocess,sys; subprocess.run([sys.executable, '-c', 'input()'])"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        alone = tree_use(parent.pid)[1]
        deadline = time.monotonic() + 30
        while (tree_use(parent.pid)[1] or 0) < 1.5 * (alone or 0) or (alone or 0) == 0:
            assert time.monotonic() < deadline
            alone = alone or tree_use(parent.pid)[1]
            time.sleep(0.01)
    finally:
        parent.communicate(b"\n")
    assert tree_use(parent.pid) == (None, None)


def test_telemetry_samples_the_process_and_its_metrics() -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with Telemetry(pid=os.getpid(), url=url, interval_s=0.01) as telemetry:
            deadline = time.monotonic() + 30
            while len(telemetry.server_metrics.get("t", [])) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert telemetry.server_metrics["benchctl:num_requests_running"][0] == 3.0
    assert (telemetry.telemetry["server.rss_bytes"][0] or 0) > 1e6
    assert {len(column) for column in telemetry.telemetry.values()} == {len(telemetry.telemetry["t"])}


def test_telemetry_of_a_server_that_is_gone_has_no_samples() -> None:
    with Telemetry(pid=2**22 + 1, url="http://127.0.0.1:1", interval_s=0.01) as telemetry:
        time.sleep(0.05)
    assert telemetry.server_metrics == {}
    assert "server.rss_bytes" not in telemetry.telemetry
