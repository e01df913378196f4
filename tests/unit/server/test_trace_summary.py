"""`scripts/trace_summary.py` on a trace that is known by heart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "trace_summary.py"


def test_kernels_pauses_and_phases_per_step(tmp_path: Path) -> None:
    kernels = [{"ph": "X", "cat": "kernel", "name": "gemv", "ts": ts, "dur": 10.0} for ts in (0.0, 14.0, 100.0, 112.0)]
    spans = [
        {"ph": "X", "cat": "benchctl", "name": "schedule", "ts": ts, "dur": 4.0, "args": {"step": step}}
        for step, ts in ((1, 0.0), (2, 90.0))
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [*kernels, *spans]}))
    done = subprocess.run([sys.executable, str(SCRIPT), str(trace)], capture_output=True, text=True, check=True)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines == [
        "2 steps",
        "61.0 us/step from first to last kernel, 2 kernels a step",
        "20.0 us/step busy",
        "3.0 us/step pauses up to 5 us",
        "38.0 us/step pauses up to 100 us",
        "20.0 us/step 2.0 x 10.00 us gemv",
        "4.0 us/step host, schedule",
    ]


def test_a_trace_of_something_else_is_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text('{"traceEvents": []}')
    done = subprocess.run([sys.executable, str(SCRIPT), str(trace)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "holds no steps" in done.stderr
