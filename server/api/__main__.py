"""`python -m server.api`: the API process, started by the supervisor."""

from __future__ import annotations

from server.child import Child, run_child


def main(child: Child) -> int:
    with child.timeline.span("imports"):
        from server.api.lifecycle import serve
    return serve(child, int(child.process.rpartition("-")[2]))


if __name__ == "__main__":
    run_child("api", main)
