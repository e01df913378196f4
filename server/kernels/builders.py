"""Processes that compile Triton kernels for a worker whose cache is empty.

Triton holds the interpreter's lock while it compiles (12 kernels take two threads as long as one: 1.5 s), so that more
threads compile no faster, and Dynamo's tracing in the main thread waits for them, too. A builder
(`server.kernels.build`) is told a kernel, the types of its arguments and the kind of GPU, and leaves the outcome in
Triton's cache on disk, where the worker's own launch finds it. It has no GPU. The processes are started before the
worker imports torch, so that they have imported it, too, when the first kernel is wanted.

Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

_LEAST_CORES = 4
"""Below that the imports of a builder take the worker's core."""
_MOST_BUILDERS = 6
"""For some 50 kernels of 0.1 to 0.2 s each; importing torch takes every process two seconds of a core."""
_PATIENCE_S = 60
"""For one kernel, and for the imports before the first."""


class Job(msgspec.Struct, array_like=True):
    """One specialisation of a kernel."""

    module: str
    kernel: str
    tensors: list[str]
    """Names of torch's dtypes; all are taken to be aligned to 16 bytes."""
    scalars: list[int | float]
    constants: list[Any]
    options: dict[str, int | bool]
    target: tuple[str, int, int]
    """Fields of Triton's `GPUTarget`."""


class Builders:
    """`count` builder processes; use from any thread. A failure costs time only: the worker compiles by itself."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-P", "-m", "server.kernels.build"]
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closed = False
        for _ in range(count):
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            )
            self._processes.append(process)
            self._idle.put(process)

    def build(self, job: Job) -> bool:
        """Wait until a builder has compiled the kernel; False if none could."""
        if self._closed:
            return False
        process = self._idle.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            # JSON has no line breaks of its own.
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            answered, _, _ = select.select([process.stdout], [], [], _PATIENCE_S)
            answer = process.stdout.readline() if answered else b"no answer within %d s" % _PATIENCE_S
        except (OSError, ValueError, TypeError) as error:
            answer = str(error).encode()
        if answer == b"\n":
            self._idle.put(process)
            return True
        # One that fails once is not asked again, but whoever waits for an idle one must not wait for ever.
        self._closed = True
        self._idle.put(process)
        logger.warning(
            "kernels are compiled in the worker: %s",
            answer.decode("utf-8", "replace").strip() or "a builder process has ended",
        )
        return False

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


_current: Builders | None = None


def current() -> Builders | None:
    """Those of this process, while it has some."""
    return _current


def start_if_cold(cache: Path) -> None:
    """Start builders for this process if Triton's cache directory is empty and there are cores for them."""
    global _current
    cores = len(os.sched_getaffinity(0))
    if cores < _LEAST_CORES or (cache.is_dir() and next(cache.iterdir(), None) is not None):
        return
    try:
        _current = Builders(min(_MOST_BUILDERS, cores // 2))
    except OSError as error:
        logger.warning("kernels are compiled in the worker: %s", error)


def stop() -> None:
    """End this process's builders, if there are any."""
    global _current
    builders, _current = _current, None
    if builders is not None:
        builders.close()
