"""Profiles of some steps: parts of each process, joined on one clock."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from server.config import ProfileOptions
from server.errors import UserError
from server.profiling import SpanProfile, check_directory, merge, write_part


def test_spans_of_the_wanted_steps_are_joined_with_torchs(tmp_path: Path) -> None:
    options = ProfileOptions(directory=str(tmp_path), skip=2, steps=2)
    profile = SpanProfile("engine", options)
    now = time.monotonic_ns()
    for step in range(1, 7):
        profile.add("schedule", step, now + step * 1000, now + step * 1000 + 500)
    assert not profile.is_active
    base = time.time_ns() - 1_000_000_000
    write_part(
        options,
        "worker-0",
        {
            "baseTimeNanoseconds": base,
            "traceEvents": [
                {"ph": "X", "name": "kernel", "ts": 1_000_000.0, "dur": 3.0},
                {"ph": "M", "name": "process_name"},
            ],
        },
    )
    path = merge(str(tmp_path))
    assert path is not None
    events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    spans = [event for event in events if event["name"] == "schedule"]
    assert [span["args"]["step"] for span in spans] == [3, 4]
    assert [span["dur"] for span in spans] == [0.5, 0.5]
    assert min(event["ts"] for event in events if "ts" in event) == 0.0
    kernel = next(event for event in events if event["name"] == "kernel")
    assert abs(kernel["ts"] - spans[0]["ts"]) < 1e6, "both clocks are brought to one"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.json"]


def test_nothing_is_recorded_without_a_directory(tmp_path: Path) -> None:
    profile = SpanProfile("engine", ProfileOptions())
    assert not profile.is_active
    profile.add("schedule", 100, 1, 2)
    assert merge(str(tmp_path)) is None


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--profile .*choose a writable directory"):
        check_directory(str(tmp_path / "file"))
    (tmp_path / "part-engine.json").write_text("old")
    check_directory(str(tmp_path))
    assert not (tmp_path / "part-engine.json").exists()
