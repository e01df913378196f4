"""The whole server as processes: start, drain, deaths, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.serving import Server, gone, start_server

TINY = ("tiny", "--enforce-eager", "--device", "cpu", "--max-num-seqs", "8", "--cpu-kv-cache-gib", "0.02")
# However many cores there are.
TINY += ("--api-server-count", "1")
LONG = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "stream": True}


def stream_in_background(server: Server) -> tuple[threading.Thread, list[str], threading.Event]:
    """Read a long stream in a thread: its lines, and an event set at the first one."""
    lines: list[str] = []
    started = threading.Event()

    def run() -> None:
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
                for line in response.iter_lines():
                    lines.append(line)
                    started.set()
        except httpx.HTTPError as error:
            lines.append(f"transport error: {error!r}")
        started.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, lines, started


def runtime_dirs_of(pid: int) -> list[Path]:
    bases = [Path(p) for p in (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp") if p]
    return [path for base in bases for path in base.glob(f"benchctl-{pid}-*")]


def port_is_free(url: str) -> bool:
    port = int(url.rpartition(":")[2])
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_serves_then_drains_on_sigterm(tmp_path: Path) -> None:
    startup = tmp_path / "startup.json"
    trace = tmp_path / "trace.json"
    with start_server(tmp_path, *TINY, "--startup-json", str(startup), "--startup-trace", str(trace)) as server:
        server.wait_ready()
        assert httpx.get(f"{server.url}/health").status_code == 200
        timeline = httpx.get(f"{server.url}/v1/startup").json()
        assert {span["process"] for span in timeline["spans"]} >= {"supervisor", "worker-0", "engine", "api-0"}
        (spawn,) = [span for span in timeline["spans"] if (span["process"], span["name"]) == ("supervisor", "spawn")]
        assert spawn["attributes"]["api_processes"] == "1"
        assert timeline["unaccounted_ns"] < timeline["healthy_ns"] - timeline["exec_ns"]
        assert json.loads(startup.read_text())["exec_ns"] == timeline["exec_ns"]
        assert json.loads(trace.read_text())["traceEvents"]

        thread, lines, started = stream_in_background(server)
        assert started.wait(30)
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        thread.join(30)
        assert server.process.wait(30) == 0
        assert lines[-2:] == ["data: [DONE]", ""], "a request in flight is finished before the server leaves"
        assert gone(children)
        assert port_is_free(server.url)
        assert not runtime_dirs_of(server.process.pid)


@pytest.mark.parametrize("module", ["server.worker", "server.engine"])
def test_a_dead_process_fails_streams_and_takes_the_server_down(tmp_path: Path, module: str) -> None:
    with start_server(tmp_path, *TINY) as server:
        server.wait_ready()
        thread, lines, started = stream_in_background(server)
        assert started.wait(30)
        children = server.children()
        os.kill(server.child(module), signal.SIGKILL)
        thread.join(20)
        assert not thread.is_alive(), "the client must not hang"
        assert any('"error"' in line for line in lines if line.startswith("data: ")), lines[-3:]
        assert server.process.wait(20) == 1
        assert gone(children)
        assert "was killed by SIGKILL" in server.log_text()
        assert not runtime_dirs_of(server.process.pid)


def test_killing_the_supervisor_leaves_nobody(tmp_path: Path) -> None:
    with start_server(tmp_path, *TINY) as server:
        server.wait_ready()
        children = server.children()
        assert len(children) == 3
        server.process.kill()
        server.process.wait()
        assert gone(children)
        assert port_is_free(server.url)
    # The next server sweeps up the directory that the killed one could not remove.
    with start_server(tmp_path, *TINY) as after:
        after.wait_ready()
        assert not runtime_dirs_of(server.process.pid)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_while_starting(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with start_server(tmp_path, *TINY) as server:
        deadline = time.monotonic() + 30
        while len(server.children()) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        children = server.children()
        server.process.send_signal(number)
        assert server.process.wait(20) == code
        assert gone(children)
        assert not server.ready_file.exists()


def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        command = [sys.executable, "-m", "benchctl", "serve", *TINY, "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such-model",), ["no-such-model"]),
        (("tiny", "--enforce-eager", "--attention-backend", "FLASH_ATTN", "--device", "cpu"), ["FLASH_ATTN", "CUDA"]),
        (("tiny", "--enforce-eager", "--attention-backend", "TRITON_ATTN", "--device", "cpu"), ["TRITON_ATTN", "CUDA"]),
    ],
)
def test_what_cannot_run_is_one_line(tmp_path: Path, arguments: tuple[str, ...], words: list[str]) -> None:
    with start_server(tmp_path, *arguments) as server:
        assert server.process.wait(60) == 2
        (line,) = [line for line in server.log_text().splitlines() if line.startswith("benchctl: ")]
        assert all(word in line for word in words), line
        assert "Traceback" not in server.log_text()
