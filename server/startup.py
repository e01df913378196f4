"""What a start of the server took: spans of all processes joined into one timeline."""

from __future__ import annotations

from typing import Any

import msgspec

from server.timeline import Span


class StartupTimeline(msgspec.Struct, kw_only=True):
    """A start from exec to healthy; `startup.json` in the runtime directory and the body of `/v1/startup`."""

    exec_ns: int
    """CLOCK_MONOTONIC of the supervisor's exec."""
    healthy_ns: int
    """CLOCK_MONOTONIC when the last API process listened, with a model that can answer."""
    unaccounted_ns: int
    """Part of exec..healthy during which no process was in any recorded phase."""
    spans: list[Span]
    """Sorted by start."""


def leaf_spans(spans: list[Span]) -> list[Span]:
    """Spans that no other span of the same process refines (by path prefix)."""
    names = {(span.process, span.name) for span in spans}
    parents = {
        (process, "/".join(name.split("/")[:depth]))
        for process, name in names
        for depth in range(1, name.count("/") + 1)
    }
    return [span for span in spans if (span.process, span.name) not in parents]


def unaccounted_ns(spans: list[Span], start_ns: int, end_ns: int) -> int:
    """Nanoseconds of [start, end] that the union of the leaf spans does not cover.

    Only leaves count: a parent span would hide the gaps between its phases. Nor do spans with the attribute
    `background`: nobody waits for them.
    """
    covered_until = start_ns
    gaps = 0
    for span in sorted(leaf_spans(spans), key=lambda s: s.start_ns):
        if span.attributes.get("background"):
            continue
        if span.start_ns >= end_ns:
            break
        if span.start_ns > covered_until:
            gaps += span.start_ns - covered_until
        covered_until = max(covered_until, span.end_ns)
    return gaps + max(0, end_ns - covered_until)


def join_timeline(spans: list[Span], exec_ns: int, healthy_ns: int) -> StartupTimeline:
    return StartupTimeline(
        exec_ns=exec_ns,
        healthy_ns=healthy_ns,
        unaccounted_ns=unaccounted_ns(spans, exec_ns, healthy_ns),
        spans=sorted(spans, key=lambda span: span.start_ns),
    )


def chrome_trace(timeline: StartupTimeline) -> dict[str, Any]:
    """The timeline in the Trace Event Format (chrome://tracing, Perfetto): complete events, microseconds from exec."""
    processes = sorted({span.process for span in timeline.spans})
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": number, "args": {"name": process}}
        for number, process in enumerate(processes)
    ]
    events += [
        {
            "name": span.name,
            "ph": "X",
            "pid": processes.index(span.process),
            "tid": span.name.split("/")[0] if span.attributes.get("thread") else "main",
            "ts": (span.start_ns - timeline.exec_ns) / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            "args": span.attributes,
        }
        for span in timeline.spans
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}
