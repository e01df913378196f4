from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from server.errors import UserError
from workloads.arrivals import build_schedule, parse_arrival
from workloads.base import schedule_digest


def times(spec: dict[str, Any], n: int | None = None, seed: int = 1) -> np.ndarray:
    schedule = build_schedule(spec, n, seed)
    assert schedule.times_s is not None
    return schedule.times_s


def test_constant_has_equal_gaps_from_zero() -> None:
    schedule = build_schedule({"name": "constant", "rate": 4}, 9, 0)
    assert schedule.times_s is not None
    assert schedule.times_s.tolist() == [i / 4 for i in range(9)]
    assert schedule.offered_rate == 4
    assert schedule.digest == schedule_digest([i / 4 for i in range(9)])


def test_poisson_gaps_are_exponential_and_independent() -> None:
    gaps = np.diff(times({"name": "poisson", "rate": 50}, 5000), prepend=0)
    assert stats.kstest(gaps, "expon", args=(0, 1 / 50)).pvalue > 0.01
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "duration_s", "number"), [(30, None, 30), (None, 3.0, 60), (30, 3.0, 30), (99, 3.0, 60)])
def test_an_exact_poisson_offers_its_rate(seed: int, n: int | None, duration_s: float | None, number: int) -> None:
    spec = {"name": "poisson", "rate": 20.0, "exact_rate": True}
    schedule = build_schedule(spec if duration_s is None else {**spec, "duration_s": duration_s}, n, seed)
    assert schedule.times_s is not None
    assert (len(schedule.times_s), schedule.times_s[0]) == (number, 0.0)
    assert schedule.times_s[-1] == pytest.approx((number - 1) / 20)
    assert schedule.offered_rate == pytest.approx(20.0)


def test_an_exact_poisson_is_one_between_its_ends() -> None:
    gaps = np.diff(times({"name": "poisson", "rate": 50, "exact_rate": True}, 5000))
    assert stats.kstest(gaps, "expon", args=(0, 1 / 50)).pvalue > 0.01
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.05


def test_an_exact_poisson_of_next_to_nothing_is_one_request() -> None:
    assert times({"name": "poisson", "rate": 0.01, "duration_s": 20.0, "exact_rate": True}).tolist() == [0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_follow_vllms_parameters(burstiness: float) -> None:
    gaps = np.diff(times({"name": "gamma", "rate": 20, "burstiness": burstiness}, 4000), prepend=0)
    assert stats.kstest(gaps, "gamma", args=(burstiness, 0, 1 / (20 * burstiness))).pvalue > 0.01


@pytest.mark.parametrize("shape", ["linear", "exponential"])
@pytest.mark.parametrize(("start", "end"), [(5.0, 50.0), (50.0, 5.0), (20.0, 20.0)])
def test_ramp_follows_its_rate(shape: str, start: float, end: float) -> None:
    length = 100.0
    t = times({"name": "ramp", "start_rate": start, "end_rate": end, "duration_s": length, "shape": shape})

    def share(x: np.ndarray) -> np.ndarray:
        grid = np.linspace(0, length, 20_001)
        rate = start + (end - start) * grid / length if shape == "linear" else start * (end / start) ** (grid / length)
        area = np.concatenate([[0], np.cumsum((rate[1:] + rate[:-1]) / 2)])
        return np.interp(x, grid, area / area[-1])

    assert 0 <= t[0] <= t[-1] < length
    assert stats.kstest(t, share).pvalue > 0.01
    expected = length * (
        (start + end) / 2 if shape == "linear" or start == end else (end - start) / math.log(end / start)
    )
    assert abs(len(t) - expected) < 5 * math.sqrt(expected)


def test_constant_spaced_ramp_has_the_integral_of_the_rate_as_its_count() -> None:
    t = times({"name": "ramp", "start_rate": 1, "end_rate": 3, "duration_s": 10, "spacing": "constant"})
    assert len(t) == 20
    assert np.all(np.diff(np.diff(t)) < 0)


def test_steps_change_the_rate_and_end() -> None:
    spec = {
        "name": "steps",
        "spacing": "constant",
        "steps": [{"rate": 2, "duration_s": 5}, {"rate": 10, "duration_s": 2}],
    }
    t = times(spec)
    assert len(t[t < 5]) == 10
    assert len(t[t >= 5]) == 20
    assert t[-1] < 7
    assert build_schedule(spec, None, 0).duration_s == 7


def test_burst_and_closed_loop() -> None:
    burst = build_schedule({"name": "burst", "max_concurrency": 2}, 3, 0)
    assert burst.times_s is not None
    assert burst.times_s.tolist() == [0, 0, 0]
    assert burst.concurrency == 2
    assert burst.offered_rate is None
    closed = build_schedule({"name": "concurrency", "concurrency": 8, "duration_s": 3}, None, 0)
    assert (closed.times_s, closed.concurrency, closed.duration_s, closed.digest) == (None, 8, 3, None)


def test_trace_times_can_be_sped_up_and_cut() -> None:
    schedule = build_schedule(
        {"name": "trace", "speedup": 2, "duration_s": 2}, None, 0, timestamps_s=[0.0, 1.0, 3.0, 5.0]
    )
    assert schedule.times_s is not None
    assert schedule.times_s.tolist() == [0, 0.5, 1.5]


@pytest.mark.parametrize("stamps", [None, [], [0.0, None], [1.0, 0.5], [-1.0, 0.0], [0.0, math.nan]])
def test_trace_times_that_are_none_or_fall_are_refused(stamps: list[float | None] | None) -> None:
    with pytest.raises(UserError, match="timestamps"):
        build_schedule({"name": "trace"}, None, 0, timestamps_s=stamps)


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(0.01, 1e4),
    burstiness=st.floats(0.05, 20),
    n=st.integers(1, 300),
    duration=st.none() | st.floats(0.5, 20),
    seed=st.integers(0, 2**64 - 1),
    name=st.sampled_from(["constant", "poisson", "gamma"]),
)
def test_open_loop_schedules_rise_and_respect_both_bounds(
    rate: float, burstiness: float, n: int, duration: float | None, seed: int, name: str
) -> None:
    spec: dict[str, Any] = {"name": name, "rate": rate, "duration_s": duration}
    if name == "gamma":
        spec["burstiness"] = burstiness
    try:
        schedule = build_schedule(spec, n, seed)
    except UserError as error:
        if duration is None or "no request falls into" not in str(error):
            raise
        return
    t = schedule.times_s
    assert t is not None
    assert t.dtype == np.float64
    assert np.all(np.diff(t) >= 0)
    assert t[0] >= 0
    assert len(t) == n if duration is None else (len(t) <= n and t[-1] < duration)
    again = build_schedule(spec, n, seed)
    assert again.digest == schedule.digest
    # The spec in the result builds the same schedule.
    assert build_schedule(schedule.spec, n, seed).digest == schedule.digest


def test_a_duration_is_filled_to_its_end() -> None:
    t = times({"name": "gamma", "rate": 100, "burstiness": 0.05, "duration_s": 60})
    assert t[-1] > 55
    assert abs(len(t) - 6000) < 6 * math.sqrt(6000 / 0.05)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "key"), [("constant", "rate"), ("poisson", "rate"), ("gamma", "burstiness"), ("poisson", "duration_s")]
)
def test_numbers_must_be_positive_and_finite(name: str, key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{key} must be a number above 0"):
        build_schedule({"name": name, "rate": 1.0, key: value}, 5, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("posson:rate=1", "did you mean `poisson`"),
        ("poisson:rte=1", "unknown key `rte`; did you mean `rate`"),
        ("poisson", "missing required field `rate`"),
        ("poisson:rate=x", "`rate`: Expected `float`"),
        ("poisson:rate", "expected key=value"),
        ("concurrency:concurrency=0", "concurrency must be a number above 0"),
        ('{"name":"steps","steps":[]}', "`steps` is empty"),
        ('{"name":"steps","steps":[{"rate":1,"duration":1}]}', "did you mean `duration_s`"),
        ('{"name":"steps","steps":[{"rate":0,"duration_s":1}]}', r"steps\[0\].rate must be"),
        ('{"name":', "not a JSON object"),
        ("constant:rate=1e12,duration_s=1e6", "more than"),
        ("poisson:rate=1e-320", "due after"),
        ("gamma:rate=1,burstiness=1e-300,duration_s=5", "at least 0.001"),
        ("poisson:rate=0.001,duration_s=0.001", "no request falls into"),
    ],
)
def test_bad_specifications_are_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_schedule(parse_arrival(text), None if "duration" in text else 5, 0)
    assert "\n" not in str(caught.value)


def test_a_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="has no end"):
        build_schedule({"name": "poisson", "rate": 1}, None, 0)
    with pytest.raises(UserError, match="at least 1"):
        build_schedule({"name": "poisson", "rate": 1}, 0, 0)
