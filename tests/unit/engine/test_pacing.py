"""When the next step is due, on a clock of the test's own."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from server.engine.core import EngineCore
from server.engine.pacing import HOST_FACTOR, MARGIN_NS, PACE_FACTOR, Pacer
from server.timerfd import TimerFd

MS = 1_000_000


def run_steps(pacer: Pacer, steps: list[tuple[int, int, float]], *, host_ms: int = 1, start: int = 0) -> int:
    """Steps one after another, each of (prompt tokens, generating requests, milliseconds); time of the last result."""
    now = start
    for prompt_tokens, num_decodes, duration_ms in steps:
        pacer.scheduled(now, prompt_tokens, num_decodes)
        now += int(duration_ms * MS)
        pacer.finished(now, host_ms * MS)
    return now


def run_decodes(pacer: Pacer, durations_ms: list[int], host_ms: int = 1) -> int:
    """Steps of one request, the next one sent while one runs; returns the time of the last result."""
    now = 0
    pacer.scheduled(now, 0, 1)
    for duration in durations_ms:
        pacer.scheduled(now, 0, 1)
        now += duration * MS
        pacer.finished(now, host_ms * MS)
    return now


def due_ms(pacer: Pacer, began: int, *, has_prompts: bool = False) -> float | None:
    """How long after `began` the next step is due, what is left for the host added; None: at once."""
    due = pacer.due_ns(has_prompts=has_prompts)
    return (due + int(HOST_FACTOR * MS) + MARGIN_NS - began) / MS if due else None


def test_a_step_is_due_before_the_one_that_runs_ends() -> None:
    pacer = Pacer()
    now = run_decodes(pacer, [10, 12])
    assert pacer.due_ns(has_prompts=False) == now + 10 * MS - int(HOST_FACTOR * MS) - MARGIN_NS, (
        "the shorter one counts"
    )
    assert due_ms(pacer, now, has_prompts=True) == 10, "who waits is taken in just as soon"


def test_is_due_at_once_while_durations_are_unknown() -> None:
    pacer = Pacer()
    assert due_ms(pacer, 0) is None
    now = run_decodes(pacer, [10])
    assert due_ms(pacer, now) is None, "one duration is not enough"
    pacer.scheduled(now, 0, 1)
    assert due_ms(pacer, now) is None, "two are in flight"


def test_a_step_with_prompts_takes_as_long_as_generating_alone_at_least() -> None:
    pacer = Pacer()
    now = run_steps(pacer, [(0, 4, 10), (0, 4, 10), (100, 4, 11)])
    pacer.scheduled(now, 100, 5)
    assert due_ms(pacer, now) == 10
    assert due_ms(pacer, now, has_prompts=True) is None, "a prompt that waits has nothing to gain"
    now = run_steps(pacer, [], start=now + 30 * MS)
    pacer.finished(now, MS)
    pacer.scheduled(now, 0, 6)
    assert due_ms(pacer, now) == 10, "the step with prompts has taught nothing about one without"


def test_a_step_with_prompts_is_foretold_by_the_best_pace_of_long_ones() -> None:
    pacer = Pacer()
    # 400 tokens in 10 ms, 1000 in 20; a short one has waited for the weights, not for products.
    now = run_steps(pacer, [(396, 4, 10), (996, 4, 20), (10, 4, 4)])
    pacer.scheduled(now, 1995, 5)
    assert due_ms(pacer, now) == pytest.approx(40 * PACE_FACTOR)


def test_a_batch_that_has_shrunk_is_not_foretold() -> None:
    pacer = Pacer()
    now = run_steps(pacer, [(0, 100, 10), (0, 100, 10)])
    pacer.scheduled(now, 0, 75)
    assert due_ms(pacer, now) == 10
    pacer.finished(now + 8 * MS, MS)
    pacer.scheduled(now + 8 * MS, 0, 56)
    assert due_ms(pacer, now + 8 * MS) is None, "a quarter fewer than the last"


def test_a_late_host_is_scheduled_earlier_until_the_device_no_longer_waits() -> None:
    """A step of 10 ms whose host needs 3 ms, twice what it needed before: the wait shrinks with every step."""
    pacer = Pacer()
    now = run_decodes(pacer, [20, 20], host_ms=1)
    waits = []
    for _ in range(12):
        sent = max(now, pacer.due_ns(has_prompts=False))
        launched = sent + 3 * MS
        ends = now + 10 * MS
        waits.append(max(0, launched - ends))
        pacer.scheduled(sent, 0, 1)
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
    core._depth = depth
    core.scheduler = SimpleNamespace(num_in_flight=0, requests={"r": None}, has_prompts=False)
    sent: list[SimpleNamespace] = []

    def schedule() -> SimpleNamespace:
        core.scheduler.num_in_flight += 1
        return SimpleNamespace(scheduled={"r": 1})

    core.scheduler.schedule = schedule
    core._note = lambda *_: None
    core._to_worker = SimpleNamespace(send=sent.append)
    core._supply()
    assert len(sent) == wanted


def test_the_loop_is_woken_when_a_step_is_due() -> None:
    core = cast(Any, object.__new__(EngineCore))
    core.scheduler = SimpleNamespace(num_in_flight=1, requests={"r": None}, has_prompts=False)
    due_ns = time.monotonic_ns() + 5 * MS
    core._pacer = SimpleNamespace(due_ns=lambda *, has_prompts: due_ns, are_steps_short=lambda: False)
    core._depth, core._alarm = 2, TimerFd()
    poller = zmq.Poller()
    poller.register(core._alarm, zmq.POLLIN)
    try:
        core._supply()
        assert poller.poll(10_000) == [(core._alarm.fileno(), zmq.POLLIN)]
        assert time.monotonic_ns() >= due_ns
        core._alarm.clear()
        assert poller.poll(0) == []
    finally:
        core._alarm.close()
