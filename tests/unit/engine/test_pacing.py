"""When the next step is due, on a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.engine.core import EngineCore
from server.engine.pacing import HOST_FACTOR, MARGIN_NS, Pacer

MS = 1_000_000


def run_decodes(pacer: Pacer, durations_ms: list[int], host_ms: int = 1, start: int = 0) -> int:
    """Steps one after another, the next one sent while one runs; returns the time of the last result."""
    now = start
    pacer.scheduled(now, True)
    for duration in durations_ms:
        pacer.scheduled(now, True)
        now += duration * MS
        pacer.finished(now, host_ms * MS)
    return now


def test_a_step_is_due_before_the_one_that_runs_ends() -> None:
    pacer = Pacer()
    now = run_decodes(pacer, [10, 12])
    assert pacer.due_ns() == now + 10 * MS - int(HOST_FACTOR * MS) - MARGIN_NS, "the shorter one counts"


def test_is_due_at_once_while_durations_are_unknown() -> None:
    pacer = Pacer()
    assert pacer.due_ns() == 0
    now = run_decodes(pacer, [10])
    assert pacer.due_ns() == 0, "one duration is not enough"
    pacer.scheduled(now, False)
    assert pacer.due_ns() == 0, "two are in flight"
    pacer.finished(now + 10 * MS, MS)
    assert pacer.due_ns() == 0, "a step with a prompt takes as long as it takes"
    pacer.finished(now + 90 * MS, MS)
    pacer.scheduled(now + 90 * MS, True)
    assert pacer.due_ns() == 0, "the batch has changed"


def test_a_late_host_is_scheduled_earlier_until_the_device_no_longer_waits() -> None:
    """A step of 10 ms whose host needs 3 ms, twice what it needed before: the wait shrinks with every step."""
    pacer = Pacer()
    now = run_decodes(pacer, [20, 20], host_ms=1)
    waits = []
    for _ in range(12):
        sent = max(now, pacer.due_ns())
        launched = sent + 3 * MS
        ends = now + 10 * MS
        waits.append(max(0, launched - ends))
        pacer.scheduled(sent, True)
        now = ends
        pacer.finished(now, 3 * MS)
        # The device begins when the step is launched, not when the result was sent.
        now = max(now, launched)
    assert waits[0] > 0
    assert waits[-1] == 0


@pytest.mark.parametrize(("depth", "short", "wanted"), [(2, False, 2), (2, True, 3), (1, True, 1)])
def test_short_steps_get_one_more_in_flight(depth: int, short: bool, wanted: int) -> None:
    core = cast(Any, object.__new__(EngineCore))
    core._pacer = Pacer()
    run_decodes(core._pacer, [1, 1 if short else 2])
    assert core._pacer.are_steps_short() == short
    core._depth, core._next_due_ns = depth, None
    core.scheduler = SimpleNamespace(num_in_flight=0, requests={"r": None})
    sent: list[SimpleNamespace] = []

    def schedule() -> SimpleNamespace:
        core.scheduler.num_in_flight += 1
        return SimpleNamespace(scheduled={"r": 1})

    core.scheduler.schedule = schedule
    core._note = lambda *_: None
    core._to_worker = SimpleNamespace(send=sent.append)
    core._supply()
    assert len(sent) == wanted


def test_a_step_that_becomes_due_before_the_loop_sleeps_is_not_slept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.1 ms too early when it is looked at, 0.9 ms a moment later: less than the poll can wait for."""
    core = cast(Any, object.__new__(EngineCore))
    core.scheduler = SimpleNamespace(num_in_flight=1, requests={"r": None})
    core._pacer = SimpleNamespace(due_ns=lambda: 10_000_000, are_steps_short=lambda: False)
    core._depth, core._next_due_ns = 2, None
    clock = iter([8_900_000, 9_100_000])
    monkeypatch.setattr("server.engine.core.time", SimpleNamespace(monotonic_ns=lambda: next(clock)))
    core._supply()
    assert core._pause_ms() == 0
    core.scheduler.num_in_flight = 2
    core._supply()
    assert core._pause_ms() == 1000, "both steps are with the worker: its next result wakes the loop"
