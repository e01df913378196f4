"""The start-up timeline: named spans on CLOCK_MONOTONIC, one clock for all processes of the machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec


class Span(msgspec.Struct, omit_defaults=True):
    """One timed phase of a process' start.

    `name` is a path with `/` between levels, e.g. `compile/inductor/piece-1`; a span's parent is the one whose path
    is its prefix.
    """

    process: str
    """`supervisor`, `api-0`, `engine` or `worker-0`."""
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = {}
    """For example `{"cache": "hit"}` or `{"bytes": 269060552}`."""


class Timeline:
    """Collects the spans of one process."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.spans: list[Span] = []

    def add(self, name: str, start_ns: int, end_ns: int, **attributes: Any) -> Span:
        span = Span(self.process, name, start_ns, end_ns, attributes)
        self.spans.append(span)
        return span

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
        """Time a block; the yielded dict takes attributes that are known only at its end."""
        start = time.monotonic_ns()
        try:
            yield attributes
        finally:
            self.add(name, start, time.monotonic_ns(), **attributes)


def process_start_ns() -> int:
    """CLOCK_MONOTONIC time at which the calling process was created, from /proc (10 ms resolution).

    `fork` keeps the start time of the new process, `exec` does not change it. Field 22 of /proc/self/stat counts
    clock ticks since boot, on CLOCK_BOOTTIME; the two clocks differ only by time spent suspended.
    """
    import os

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    ticks = int(fields[19])
    boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    suspended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return boot_ns - suspended_ns
