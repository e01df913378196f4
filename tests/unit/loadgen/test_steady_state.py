"""The steady-state window of loads whose shape is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchctl.loadgen.steady_state import in_flight, steady_window


def test_requests_in_flight_are_counted() -> None:
    starts, ends = np.array([0.0, 1.0, 1.0, 3.0]), np.array([2.0, 4.0, 1.5, 3.0])
    assert in_flight(starts, ends, np.array([-1, 0, 1, 1.5, 2, 3.5, 4])).tolist() == [0, 1, 3, 2, 1, 1, 0]


@pytest.mark.parametrize("seed", range(5))
def test_a_warm_up_transient_is_cut_off_and_so_is_the_draining(seed: int) -> None:
    # Arrivals at a steady rate, each staying 10 s: the number in flight rises for 10 s and is level from then on.
    starts = np.cumsum(np.random.default_rng(seed).exponential(0.1, 1000))
    window = steady_window(starts, starts + 10.0)
    assert window is not None
    assert 7 < window[0] < 25  # the level itself fluctuates by a tenth
    assert window[1] == starts[-1]


def test_a_level_load_is_steady_from_its_start() -> None:
    starts = np.repeat(np.arange(50.0), 4)  # four users, one second each
    window = steady_window(starts, starts + 1.0)
    assert window == (0.0, 49.0)


def test_an_overload_never_settles() -> None:
    starts = np.arange(500) * 0.1
    assert steady_window(starts, starts * 3 + 1) is None


def test_a_burst_has_no_steady_state() -> None:
    assert steady_window(np.zeros(100), np.linspace(1, 5, 100)) is None


def test_too_few_requests_have_none() -> None:
    starts = np.arange(19.0)
    assert steady_window(starts, starts + 1) is None
    assert steady_window(np.zeros(0), np.zeros(0)) is None
