"""Change points: found where the level changes, not where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from benchctl.history.record import Record
from benchctl.history.series import Point, build_series, change_points, cut
from reports.metrics import METRICS


def record(commit: str, day: int, value: float, *, cell: str = "cell", machine: str = "m", run: int = 0) -> Record:
    return Record(
        id=f"{commit}-{cell}-{machine}-{run}",
        commit=commit,
        committed_at=f"2026-01-{day:02d}T00:00:00+00:00",
        measured_at=f"2026-02-01T00:00:{run:02d}+00:00",
        cell_id=cell,
        config_digest="d",
        machine=machine,
        metrics={"tpot_p50_s": value},
    )


def points(values: list[float]) -> list[Point]:
    return [Point(f"c{index}", str(index), (value,)) for index, value in enumerate(values)]


@pytest.mark.parametrize("tail", ["normal", "t3"])
@pytest.mark.parametrize("n", [10, 20, 60])
def test_stable_histories_rarely_show_a_change(n: int, tail: str) -> None:
    generator = np.random.default_rng(n)
    alarms = 0
    for _ in range(200):
        noise = generator.standard_normal(n) if tail == "normal" else generator.standard_t(3, n)
        alarms += bool(cut(0.01 * noise))
    assert alarms / 200 <= 0.1


@pytest.mark.parametrize("tail", ["normal", "t3"])
def test_a_lasting_change_of_three_noises_is_placed(tail: str) -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(50):
        noise = generator.standard_normal(40) if tail == "normal" else generator.standard_t(3, 40) / 3**0.5
        noise[20:] += 3
        found = cut(0.01 * noise)
        hits += len(found) == 1 and abs(found[0] - 20) <= 1
    assert hits >= 45


def test_one_odd_commit_is_no_change() -> None:
    generator = np.random.default_rng(2)
    values = [float(v) for v in 10 * np.exp(0.01 * generator.standard_normal(30))]
    values[12] *= 3
    assert change_points(points(values)) == []


def test_two_changes_with_their_sizes() -> None:
    generator = np.random.default_rng(3)
    levels = [1.0] * 12 + [1.15] * 10 + [0.9] * 11
    values = [float(level * np.exp(0.01 * generator.standard_normal())) for level in levels]
    found = change_points(points(values))
    assert [(change.before, change.after) for change in found] == [("c11", "c12"), ("c21", "c22")]
    assert found[0].change == pytest.approx(0.15, abs=0.02)
    assert found[1].change == pytest.approx(0.9 / 1.15 - 1, abs=0.02)


def test_equal_values_and_short_series() -> None:
    assert change_points(points([1.0] * 20)) == []
    assert change_points(points([1.0, 2.0])) == []
    assert [change.after for change in change_points(points([1.0] * 6 + [1.1] * 6))] == ["c6"]
    assert change_points(points([0.0] * 10)) == []


def test_commits_are_medians_and_machines_stay_apart() -> None:
    records = [record("b", 2, 0.02, run=1), record("b", 2, 0.04, run=2), record("a", 1, 0.01), record("b", 2, 0.03)]
    records += [record("a", 1, 5.0, machine="other"), record("a", 1, 7.0, cell="second")]
    series = build_series(records, METRICS["tpot_p50_s"])
    assert [(entry.cell_id, entry.machine) for entry in series] == [("cell", "m"), ("cell", "other"), ("second", "m")]
    assert [(point.commit, point.value) for point in series[0].points] == [("a", 0.01), ("b", 0.03)]
    assert build_series(records, METRICS["tpot_p50_s"], "sec")[0].cell_id == "second"
    assert build_series(records, METRICS["ttft_p50_s"]) == []


def test_what_is_worse_depends_on_the_metric() -> None:
    records = [record(f"c{i}", i + 1, 0.01 if i < 6 else 0.02) for i in range(12)]
    series = build_series(records, METRICS["tpot_p50_s"])[0]
    assert [series.worse(change) for change in series.changes] == [True]
    assert [len(stretch) for stretch in series.stretches] == [6, 6]
