"""`--profile`: what every process did during some steps, as one Chrome trace (open it in Perfetto or chrome://tracing).

The engine and the API processes record spans of their own; the worker runs torch's profiler, which sees its operators
and the device's kernels. Each writes one part into the directory as soon as its steps are over, with times on the
system clock, and `merge` joins the parts when the server stops.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from server.config import ProfileOptions
from server.errors import UserError

PARTS = "part-*.json"
TRACE = "trace.json"


def check_directory(directory: str) -> None:
    """Make the directory and remove the parts of an earlier profile. UserError when it cannot be written."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for part in Path(directory).glob(PARTS):
            part.unlink()
        probe = Path(directory) / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--profile {directory}: {error.strerror}; choose a writable directory") from error


class SpanProfile:
    """Spans of one process over the profiled steps; costs nothing before and after."""

    def __init__(self, process: str, options: ProfileOptions) -> None:
        self._process = process
        self._options = options
        self._first_step = options.skip + 1
        self._last_step = options.skip + options.steps
        self._spans: list[tuple[str, int, int, int]] = []
        # Spans are timed on the monotonic clock, torch's traces on the system's.
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self.is_active = options.directory is not None

    def add(self, name: str, step: int, start_ns: int, end_ns: int) -> None:
        """A span of CLOCK_MONOTONIC times that belongs to `step`; the first one past the last step writes the part."""
        if not self.is_active or step < self._first_step:
            return
        if step > self._last_step:
            self.write()
            return
        self._spans.append((name, step, start_ns, end_ns))

    def write(self) -> None:
        """Write the part and record no more."""
        self.is_active = False
        events = [
            {
                "ph": "X",
                "cat": "benchctl",
                "name": name,
                "pid": self._process,
                "tid": self._process,
                "ts": (start_ns + self._offset_ns) / 1000,
                "dur": (end_ns - start_ns) / 1000,
                "args": {"step": step},
            }
            for name, step, start_ns, end_ns in self._spans
        ]
        write_part(self._options, self._process, {"traceEvents": events})


def write_part(options: ProfileOptions, process: str, trace: dict[str, Any]) -> None:
    """Write one process' part, whole or not at all."""
    assert options.directory is not None
    path = Path(options.directory) / f"part-{process}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(trace))
    temporary.rename(path)


def merge(directory: str) -> Path | None:
    """Join the parts in `directory` into `trace.json`, with times from the first event on; None when there is none."""
    events: list[dict[str, Any]] = []
    for part in sorted(Path(directory).glob(PARTS)):
        trace = msgspec.json.decode(part.read_bytes())
        base_us = trace.get("baseTimeNanoseconds", 0) / 1000
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] += base_us
            events.append(event)
        part.unlink()
    if not events:
        return None
    start = min((event["ts"] for event in events if event.get("ph") == "X"), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] -= start
    path = Path(directory) / TRACE
    path.write_bytes(msgspec.json.encode({"traceEvents": events}))
    return path
