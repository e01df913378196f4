"""`python -m server.engine`: the engine-core process."""

from __future__ import annotations

from server.child import Child, run_child


def main(child: Child) -> int:
    with child.timeline.span("imports"):
        from server.engine.core import EngineCore, on_control
    child.watch_control(on_control)
    core = EngineCore(child)
    child.flush_spans()
    core.start()
    core.run()
    return 0


if __name__ == "__main__":
    run_child("engine", main)
