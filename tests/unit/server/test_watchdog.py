"""The watchdog over real processes: stopped, silent, suspended with the machine, not begun."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.pulse import Pulse, create_pulse_fd
from server.watchdog import SILENCE_LIMIT_S, STOPPED_LIMIT_S, Watch

# Beats as often as its parent writes to it.
_CHILD = """
import sys
from server.pulse import Pulse
pulse = Pulse(int(sys.argv[1]), 3)
for _ in sys.stdin:
    pulse.beat()
    print(flush=True)
"""


class Child:
    def __init__(self) -> None:
        self.fd = create_pulse_fd()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(self.fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self.fd,),
        )
        self.watch = Watch(self.process.pid, Pulse(self.fd, 3))

    def beat(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def signal(self, number: signal.Signals, state: str) -> None:
        os.kill(self.process.pid, number)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] not in state:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def check_until(self, start: float, end: float) -> str | None:
        """Checks every half second from `start` to `end`: the last verdict."""
        now, verdict = start, None
        while now <= end:
            verdict = self.watch.check(now)
            now += 0.5
        return verdict

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.watch.close()
        os.close(self.fd)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


def test_silence_counts_from_the_first_beat_on(child: Child) -> None:
    assert child.check_until(100, 100 + 5 * SILENCE_LIMIT_S) is None, "a start may take as long as it takes"
    child.beat()
    start = 100 + 5 * SILENCE_LIMIT_S
    assert child.check_until(start, start + SILENCE_LIMIT_S - 1) is None
    child.beat()
    start += SILENCE_LIMIT_S - 1
    assert child.check_until(start, start + SILENCE_LIMIT_S - 1) is None
    start += SILENCE_LIMIT_S - 1
    assert "has not responded" in (child.check_until(start, start + 2) or "")


def test_a_stopped_process_is_found_and_a_continued_one_forgiven(child: Child) -> None:
    child.beat()
    child.signal(signal.SIGSTOP, "T")
    assert child.check_until(100, 100 + STOPPED_LIMIT_S - 0.5) is None
    child.signal(signal.SIGCONT, "SR")
    assert child.check_until(100 + STOPPED_LIMIT_S, 101 + STOPPED_LIMIT_S) is None
    child.signal(signal.SIGSTOP, "T")
    assert "stopped by a signal" in (child.check_until(110, 110 + STOPPED_LIMIT_S) or "")


def test_a_suspended_supervisor_blames_nobody(child: Child) -> None:
    child.beat()
    assert child.check_until(100, 101) is None
    assert child.watch.check(10_000) is None, "nothing could be seen for hours; that is no silence of the child's"
    assert child.check_until(10_000.5, 10_000 + SILENCE_LIMIT_S - 1) is None


def test_a_process_that_ended_is_no_business_of_the_watchdog(child: Child) -> None:
    child.process.kill()
    child.process.wait()
    assert child.check_until(100, 110) is None


def test_a_process_that_a_debugger_holds_is_left_alone(child: Child) -> None:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    attach, detach = 16, 17
    child.beat()
    if ptrace(attach, child.process.pid, None, None) != 0:
        pytest.skip("tracing is not allowed here")
    os.waitpid(child.process.pid, os.WUNTRACED)
    assert child.check_until(100, 100 + 3 * SILENCE_LIMIT_S) is None
    ptrace(detach, child.process.pid, None, None)
    child.beat()
    assert child.check_until(200, 201) is None
