"""Run the checks in `interpreted/` under Triton's interpreter.

The interpreter is chosen by an environment variable that Triton reads when kernels are defined. They run in a process
of their own, so that neither this process nor the servers it starts see the variable.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DIRECTORY = Path(__file__).parent / "interpreted"


def test_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "python_files=check_*.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(DIRECTORY)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
