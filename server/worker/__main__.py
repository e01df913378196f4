"""`python -m server.worker`: the GPU-worker process."""

from __future__ import annotations

from server.child import Child, run_child


def main(child: Child) -> int:
    # The supervisor's end of the control pipe closing ends this process; the worker itself is stopped by the engine.
    child.watch_control(lambda message: None)
    with child.timeline.span("imports"):
        from server.worker.worker import Worker
    return Worker(child).serve()


if __name__ == "__main__":
    run_child("worker", main)
