from __future__ import annotations

from pathlib import Path

from server.api.in_flight import InFlight


def test_one_process_counts_for_itself(tmp_path: Path) -> None:
    counts = InFlight(str(tmp_path / "no such folder"), 0, 1)
    counts.set(5)
    assert counts.total() == 5


def test_several_processes_see_each_other(tmp_path: Path) -> None:
    counts = [InFlight(str(tmp_path), index, 3) for index in range(3)]
    for index, count in enumerate(counts):
        count.set(10**index)
    late = InFlight(str(tmp_path), 1, 3)
    assert [count.total() for count in (*counts, late)] == [111] * 4, "one that comes later destroys nothing"
    late.set(0)
    assert counts[0].total() == 101
