"""`python -m server.worker`: the GPU-worker process."""

from __future__ import annotations

import gc
import os

from server.child import Child, run_child
from server.kernels.builders import start_if_cold
from server.worker.cuda_context import open_cuda
from server.worker.kernel_cache import choose_kernel_cache


def main(child: Child) -> int:
    # Read once, when torch loads its OpenMP library. On a CPU the pool's threads would spin between two operators and
    # take the cores from the API process, the engine and the client that share them: a step of a small model takes
    # ten times as long on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Importing torch and Inductor makes a million objects and hardly any garbage; to search them for it again and again
    # takes a fifth of the time. `server.worker.worker.settle` lets Python collect from then on.
    gc.disable()
    # The supervisor's end of the control pipe closing ends this process; the worker itself is stopped by the engine.
    child.watch_control(lambda message: None)
    if child.config.device != "cpu":
        open_cuda(child.timeline, lambda: start_if_cold(choose_kernel_cache(child.config)))
    with child.timeline.span("imports"):
        from server.worker.worker import Worker
    return Worker(child).serve()


if __name__ == "__main__":
    run_child("worker", main)
