"""A server in a process group of its own, which never outlives the benchmark that started it.

Three nets hold it: `stop()` (SIGTERM, then SIGKILL to the whole group after a limit), an `atexit` hook for an
exception that nobody caught, and PR_SET_PDEATHSIG for a benchmark that is itself killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: the child between fork and exec must not take the import or the loader lock.
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_S = 0.02

_live: set[ServerProcess] = set()


def _terminate_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ServerProcess:
    """A started command whose output goes to `log_path`.

    Start it from a thread that lives as long as the server shall: the kernel sends the parent-death signal when the
    *thread* that forked ends. `exec_ns` is CLOCK_MONOTONIC just before the fork.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.argv = list(argv)
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(log_path, "wb") as log:
            self.exec_ns = time.monotonic_ns()
            self._popen = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env) if env is not None else None,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_terminate_with_parent,
            )
        _live.add(self)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        """The exit status (negative: killed by that signal), or None while the server runs."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        if not self._exited():
            return None
        self._finish()
        return self._popen.returncode

    def wait(self) -> int:
        """Wait for the command to end by itself; the exit status. Nothing of its group survives it."""
        while (code := self.exit_code()) is None:
            time.sleep(_POLL_S)
        return code

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, wait up to `timeout_s`, SIGKILL whatever is left of the group; the exit status.

        A second call does nothing. An interrupt while waiting kills the group at once and is raised again.
        """
        if self._popen.returncode is None:
            try:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGTERM)
                deadline = time.monotonic() + timeout_s
                while not self._exited() and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
            finally:
                self._finish()
        assert self._popen.returncode is not None
        return self._popen.returncode

    def log_tail(self, lines: int = 40) -> list[str]:
        """The last lines of the log, at most 64 KiB of them; undecodable bytes are replaced."""
        return tail_of(self.log_path, lines)

    def _exited(self) -> bool:
        # WNOWAIT leaves the zombie, so that the process group's number cannot be taken by a stranger before the kill.
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _finish(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        _live.discard(self)


def tail_of(path: Path, lines: int = 40) -> list[str]:
    """Last `lines` lines of a text file that may not exist; carriage returns of progress bars end a line too."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 65536))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


@atexit.register
def stop_all() -> None:
    """Kill every server that is still running; part of interpreter exit."""
    for process in list(_live):
        process.stop(timeout_s=5.0)
