"""The start-up timeline: leaves, unaccounted time, Chrome trace."""

from __future__ import annotations

import time

from server.startup import chrome_trace, join_timeline, leaf_spans, unaccounted_ns
from server.timeline import Span, Timeline, process_start_ns


def span(process: str, name: str, start: int, end: int) -> Span:
    return Span(process, name, start, end)


def test_only_leaves_count_as_accounted() -> None:
    spans = [
        span("worker-0", "compile", 0, 100),
        span("worker-0", "compile/dynamo", 0, 30),
        span("worker-0", "compile/inductor/piece-0", 50, 80),
    ]
    assert [s.name for s in leaf_spans(spans)] == ["compile/dynamo", "compile/inductor/piece-0"]
    assert unaccounted_ns(spans, 0, 100) == 20 + 20


def test_a_name_that_merely_starts_alike_is_no_child() -> None:
    spans = [span("worker-0", "load", 0, 10), span("worker-0", "load-tokenizer", 10, 20)]
    assert len(leaf_spans(spans)) == 2


def test_overlapping_processes_are_a_union() -> None:
    spans = [span("api-0", "imports", 10, 60), span("worker-0", "imports", 40, 90), span("engine", "wait", 200, 300)]
    assert unaccounted_ns(spans, 0, 100) == 10 + 10
    assert unaccounted_ns([], 0, 100) == 100


def test_join_sorts_and_trace_is_relative_to_exec() -> None:
    timeline = join_timeline([span("b", "second", 2000, 3000), span("a", "first", 1000, 2000)], 1000, 3000)
    assert [s.name for s in timeline.spans] == ["first", "second"]
    assert timeline.unaccounted_ns == 0
    events = [e for e in chrome_trace(timeline)["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in events] == [(0.0, 1.0), (1.0, 1.0)]


def test_timeline_span_takes_late_attributes() -> None:
    timeline = Timeline("worker-0")
    with timeline.span("weights") as attributes:
        attributes["bytes"] = 7
    (only,) = timeline.spans
    assert only.attributes == {"bytes": 7}
    assert only.end_ns >= only.start_ns


def test_process_start_is_before_now_and_after_boot() -> None:
    assert 0 < process_start_ns() <= time.monotonic_ns()
    assert time.monotonic_ns() - process_start_ns() < 24 * 3600 * 1e9
