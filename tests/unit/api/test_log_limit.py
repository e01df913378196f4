"""A few records of a kind pass, the rest is counted."""

from __future__ import annotations

import logging
import time

import pytest

from server.api.log_limit import BURST, WINDOW_S, LogLimit


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", logging.WARNING, __file__, 1, text, (), None)


def test_a_flood_becomes_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limit = LogLimit()
    assert sum(limit.filter(record("bad")) for _ in range(1000)) == BURST
    assert limit.filter(record("another kind"))
    now += WINDOW_S
    following = record("bad")
    assert limit.filter(following)
    assert following.getMessage() == f"bad ({1000 - BURST} more of these were not logged)"
    assert limit.filter(record("bad"))
    now += WINDOW_S
    quiet = record("bad")
    assert limit.filter(quiet)
    assert quiet.getMessage() == "bad"


def test_kinds_without_number_take_bounded_memory() -> None:
    limit = LogLimit()
    for number in range(10_000):
        assert limit.filter(record(f"kind {number}"))
    assert len(limit._windows) <= 256
