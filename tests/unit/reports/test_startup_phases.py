"""Stacked start-up phases: they sum to the wall time, whatever the processes report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.schema import PhaseTime, StartupReport
from reports.startup_phases import UNACCOUNTED, stacked_phases
from tests.unit.reports import samples


def report(*phases: tuple[str, str, float, float], end: float = 10.0) -> StartupReport:
    rows = [PhaseTime(process=p, name=n, start_s=start, duration_s=stop - start) for p, n, start, stop in phases]
    return StartupReport(kind="cold", to_healthy_s=end, to_first_token_s=end, phases=rows)


def test_the_worker_goes_before_the_others_and_gaps_are_rows() -> None:
    stacked = stacked_phases(
        report(("api-0", "tokenizer", 0, 6), ("worker-0", "weights", 2, 5), ("client", "first token", 9, 10))
    )
    assert stacked == {"tokenizer": 3.0, "weights": 3.0, "first token": 1.0, UNACCOUNTED: 3.0}
    assert list(stacked)[-1] == UNACCOUNTED


def test_parents_do_not_hide_gaps_between_their_parts() -> None:
    stacked = stacked_phases(
        report(
            ("worker-0", "compile", 0, 10),
            ("worker-0", "compile/inductor/piece-0", 0, 4),
            ("worker-0", "compile/inductor/piece-1", 5, 10),
        )
    )
    assert stacked == {"compile/inductor": 9.0, UNACCOUNTED: 1.0}


def test_nothing_is_made_up_for_an_engine_without_phases() -> None:
    assert stacked_phases(report(("client", "first token", 9, 10))) == {}
    assert stacked_phases(StartupReport(kind="cold", to_healthy_s=None, to_first_token_s=None)) == {}


times = st.floats(-5, 20, allow_nan=False)
spans = st.tuples(
    st.sampled_from(["worker-0", "engine", "api-0", "supervisor", "other"]),
    st.sampled_from(["a", "a/b", "a/b/c", "d", "e/f"]),
    times,
    times,
)


@given(st.lists(spans, min_size=1, max_size=12))
def test_phases_sum_to_the_wall_time(raw: list[tuple[str, str, float, float]]) -> None:
    ordered = [(process, name, min(a, b), max(a, b)) for process, name, a, b in raw]
    stacked = stacked_phases(report(*ordered))
    assert sum(stacked.values()) == pytest.approx(10.0)
    assert all(seconds >= 0 for seconds in stacked.values())


def test_sample_start_has_every_phase_once() -> None:
    start = samples.startup("compile", "cold", 1.0)
    stacked = stacked_phases(start)
    assert stacked["compile/inductor"] == pytest.approx(8.4)
    assert sum(stacked.values()) == pytest.approx(start.to_first_token_s)
