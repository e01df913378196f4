"""torch's profiler over some steps of the worker (`--profile`)."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from server.config import ProfileOptions
from server.profiling import write_part


class StepProfiler:
    """Call `before_step` with every step's id."""

    def __init__(self, process: str, options: ProfileOptions, device: torch.device) -> None:
        self._process = process
        self._options = options
        self._device = device
        self._profile: profile | None = None

    def before_step(self, step_id: int) -> None:
        """Start and stop around the profiled steps; the trace is written by a thread."""
        if step_id == self._options.skip + 1:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        elif self._profile is not None and step_id > self._options.skip + self._options.steps:
            self._stop()

    def _stop(self) -> None:
        running, self._profile = self._profile, None
        assert running is not None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        running.stop()
        threading.Thread(target=self._write, args=(running,), name="profile-writer").start()

    def _write(self, done: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            done.export_chrome_trace(str(path))
            trace = msgspec.json.decode(path.read_bytes())
        kept = {key: trace[key] for key in ("traceEvents", "baseTimeNanoseconds") if key in trace}
        write_part(self._options, self._process, kept)
