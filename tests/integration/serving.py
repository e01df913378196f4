"""Starting the real server from tests: `benchctl serve` in its own process group, always stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 120


@dataclass
class Server:
    """A running `benchctl serve`."""

    process: subprocess.Popen[bytes]
    log: Path
    ready_file: Path
    url: str = ""

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.ready_file.exists():
            assert self.process.poll() is None, f"server exited with {self.process.returncode}:\n{self.log_text()}"
            assert time.monotonic() < deadline, f"server not ready:\n{self.log_text()}"
            time.sleep(0.05)
        self.url = json.loads(self.ready_file.read_text())["url"]

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        """Pids of the supervisor's children that serve: not of the one that compiles Python's bytecode for a while."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [pid for pid in map(int, path.read_text().split()) if "server.byte_compile" not in _command(pid)]

    def child(self, module: str) -> int:
        """Pid of the child that runs `python -m <module>`."""
        for pid in self.children():
            if module in _command(pid):
                return pid
        raise AssertionError(f"no child runs {module}")


@contextlib.contextmanager
def start_server(
    tmp_path: Path,
    *arguments: str,
    port: int = 0,
    env: dict[str, str] | None = None,
    prefix: tuple[str, ...] = (),
) -> Iterator[Server]:
    """`benchctl serve <arguments> --port <port>`, not yet ready; stopped with all its children at the end.

    `prefix`: a command that starts it, for instance one that lowers a limit.
    """
    number = len(list(tmp_path.glob("serve-*.log")))
    log = tmp_path / f"serve-{number}.log"
    ready_file = tmp_path / f"ready-{number}.json"
    command = [*prefix, sys.executable, "-m", "benchctl", "serve", *arguments]
    command += ["--port", str(port), "--ready-file", str(ready_file)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **(env or {})}
        )
    try:
        yield Server(process, log, ready_file)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _command(pid: int) -> list[str]:
    """The arguments of a process; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def gone(pids: list[int], timeout_s: float = 10.0) -> bool:
    """Whether all processes end (or are zombies) within the time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
