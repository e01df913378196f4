"""`python -m server.kernels.build`: a process that compiles Triton kernels without a GPU (see `builders` beside this).

Reads jobs from standard input, a line of JSON each, and answers each with a line: empty, or what went wrong. Ends with
its input.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

import msgspec
import torch
import triton
from triton.backends.compiler import GPUTarget

from server.kernels.builders import Job
from server.worker.kernel_cache import hash_triton


class CompileOnlyDriver:
    """Stands in for Triton's driver of a GPU as far as compiling asks it."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def build(job: Job) -> None:
    """Compile into Triton's cache, or find it there. Raises whatever Triton does."""
    triton.runtime.driver.set_active(CompileOnlyDriver(GPUTarget(*job.target)))
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    dtypes = [getattr(torch, name) for name in job.tensors]
    kernel.warmup(*dtypes, *job.scalars, *job.constants, grid=(1, 1, 1), **job.options)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides when this ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Triton prints is no answer
    hash_triton()
    decoder = msgspec.json.Decoder(Job)
    for line in sys.stdin.buffer:
        try:
            build(decoder.decode(line))
            answer = ""
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        answers.write(answer.encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
