from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from server.errors import UserError
from workloads.lengths import Lengths, draw_lengths


def draw(spec: Any, n: int = 4000) -> np.ndarray:
    return draw_lengths(msgspec.convert(spec, Lengths), n, np.random.default_rng(3), where="here")


def test_fixed_and_uniform() -> None:
    assert set(draw(7).tolist()) == {7}
    assert set(draw({"distribution": "fixed", "value": 9}).tolist()) == {9}
    values = draw({"distribution": "uniform", "low": 3, "high": 6})
    assert set(values.tolist()) == {3, 4, 5, 6}
    assert stats.chisquare(np.bincount(values)[3:]).pvalue > 0.01


def test_lognormal_and_normal_have_the_stated_shape() -> None:
    values = draw({"distribution": "lognormal", "median": 1000, "sigma": 0.5})
    assert stats.kstest(np.log(values), "norm", args=(np.log(1000), 0.5)).pvalue > 0.01
    values = draw({"distribution": "normal", "mean": 5000, "std": 300})
    assert stats.kstest(values, "norm", args=(5000, 300)).pvalue > 0.01


def test_truncation_puts_no_pile_on_the_bounds() -> None:
    values = draw({"distribution": "normal", "mean": 100, "std": 100, "min": 50, "max": 150})
    counts = np.bincount(values, minlength=151)[50:]
    assert values.min() >= 50
    assert values.max() <= 150
    assert max(counts[0], counts[-1]) < 4 * counts.mean()


def test_histogram_of_points_and_of_bins() -> None:
    values = draw({"distribution": "histogram", "edges": [10, 20], "weights": [1, 3]})
    assert set(values.tolist()) == {10, 20}
    assert abs((values == 20).mean() - 0.75) < 0.03
    values = draw({"distribution": "histogram", "edges": [1, 11, 111], "weights": [1, 0]})
    assert values.min() == 1
    assert values.max() == 10


@settings(max_examples=60, deadline=None)
@given(
    low=st.integers(1, 500),
    width=st.integers(0, 500),
    centre=st.floats(1, 1000),
    spread=st.floats(0.1, 500),
    kind=st.sampled_from(["normal", "lognormal"]),
)
def test_bounds_always_hold(low: int, width: int, centre: float, spread: float, kind: str) -> None:
    spec: dict[str, Any] = {"distribution": kind, "min": low, "max": low + width}
    spec |= {"mean": centre, "std": spread} if kind == "normal" else {"median": centre, "sigma": min(spread, 4.0)}
    try:
        values = draw(spec, 50)
    except UserError as error:
        if "next to nothing" not in str(error):
            raise
        return
    assert values.min() >= low
    assert values.max() <= low + width


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (0, "length 0 is below 1"),
        (-5, "length -5 is below 1"),
        (10**9, "above"),
        ({"distribution": "uniform", "low": 5, "high": 4}, "upper bound 4 is below lower bound 5"),
        ({"distribution": "uniform", "low": -1, "high": 4}, "length -1"),
        ({"distribution": "lognormal", "median": 0, "sigma": 1}, "median"),
        ({"distribution": "lognormal", "median": float("nan"), "sigma": 1}, "median"),
        ({"distribution": "normal", "mean": 10, "std": -1}, "spread"),
        ({"distribution": "normal", "mean": 10, "std": float("inf")}, "spread"),
        ({"distribution": "normal", "mean": 10, "std": 0, "min": 20}, "lies outside"),
        ({"distribution": "normal", "mean": 10, "std": 1, "min": 900}, "next to nothing"),
        ({"distribution": "histogram", "edges": [1], "weights": []}, "edges"),
        ({"distribution": "histogram", "edges": [1, 2, 3], "weights": [1]}, "edges"),
        ({"distribution": "histogram", "edges": [1], "weights": [0]}, "weights"),
        ({"distribution": "histogram", "edges": [1, 2], "weights": [1, -1]}, "weights"),
        ({"distribution": "histogram", "edges": [5, 5], "weights": [1]}, "edges must rise"),
        ({"distribution": "histogram", "edges": [0, 5], "weights": [1]}, "length 0"),
    ],
)
def test_impossible_lengths_are_refused_by_name(spec: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^here: .*{message}"):
        draw(spec)
