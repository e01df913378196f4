"""The command line as a whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_help_on_a_narrow_terminal_shows_whole_names_of_options() -> None:
    command = [sys.executable, "-m", "benchctl", "serve", "--help"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "--max-num-batched" in shown
    assert not re.search(r"--[\w-]*…", shown)


INTERRUPT_ITSELF = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started with
where = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            os.kill(os.getpid(), signal.SIGINT)
if where == "exit":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from benchctl.cli import main
main()
"""


@pytest.mark.parametrize(
    "where", ["typer", "server.errors", "benchctl.commands.workload", "workloads.sharegpt_like", "exit"]
)
def test_an_interrupt_shows_no_traceback_however_early_it_comes(where: str) -> None:
    """A signal while this module is looked for, or while the process ends."""
    argv = [sys.executable, "-c", INTERRUPT_ITSELF, where, "workload", "show", "sharegpt-like", "--num-requests", "3"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_full_disk_under_the_output_is_one_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    for arguments in (("workload", "ls"), ("workload", "export", "synthetic")):  # fits into the buffer, or does not
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "benchctl", *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        (line,) = done.stderr.splitlines()
        assert "No space left on device; free some space" in line or "cannot write -" in line
        assert done.returncode == 2


def test_a_reader_that_has_gone_hears_no_complaint() -> None:
    for arguments in (("workload", "ls"), ("workload", "export", "synthetic")):
        command = [sys.executable, "-m", "benchctl", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait() == 1
