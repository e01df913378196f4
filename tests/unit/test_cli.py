"""The command line as a whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys


def test_help_on_a_narrow_terminal_shows_whole_names_of_options() -> None:
    command = [sys.executable, "-m", "benchctl", "serve", "--help"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "--max-num-batched" in shown
    assert not re.search(r"--[\w-]*…", shown)
