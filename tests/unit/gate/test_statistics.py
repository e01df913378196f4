"""The statistics against known values, brute force and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.gate.statistics import (
    bootstrap_medians,
    center,
    holm,
    lower_bound,
    p_above,
    p_below,
    reachable_p,
    studentised,
    upper_bound,
)

GENERATOR = np.random.default_rng(7)


def test_sign_flip_p_by_brute_force() -> None:
    for n in (1, 2, 3, 4, 5):
        d = GENERATOR.normal(0.5, 1, n)
        for threshold in (-0.5, 0.0, 0.7):
            shifted = d - threshold
            flips = np.array(list(itertools.product((-1, 1), repeat=n)))
            brute = ((flips * shifted).sum(axis=1) >= shifted.sum() - 1e-12).mean()
            assert p_above(d, threshold) == pytest.approx(brute)


def test_the_smallest_p_is_that_of_all_pairs_on_one_side() -> None:
    for n in (3, 4, 5, 6, 8):
        d = np.linspace(1.0, 1.1, n)
        assert p_above(d, 0.0) == reachable_p(n) == 2.0**-n
        assert p_below(d, 0.0) > 0.9


def test_bootstrap_law_of_the_median_by_enumeration() -> None:
    for n in (4, 5, 6):
        x = np.sort(GENERATOR.normal(size=n))
        draws = np.median(x[np.array(list(itertools.product(range(n), repeat=n)))], axis=1)
        left, right, weight = bootstrap_medians(n)
        assert weight.sum() == pytest.approx(1)
        values = (x[left] + x[right]) / 2
        for point in np.unique(draws):
            assert weight[np.isclose(values, point)].sum() == pytest.approx(np.isclose(draws, point).mean())
        assert studentised(x)[1] == pytest.approx(((draws - np.median(x)) ** 2).mean() ** 0.5)


def test_bounds_and_p_values_agree() -> None:
    for n in (3, 4, 5, 6, 7, 8, 13):
        d = GENERATOR.normal(0.1, 0.05, n)
        for level in (0.3, 0.15, 0.07, 0.02):
            low, high = lower_bound(d, level), upper_bound(d, level)
            if level < reachable_p(n):
                assert low == -np.inf
                assert high == np.inf
                continue
            assert low <= center(d) <= high
            assert p_above(d, low - 1e-9) <= level + 1e-12
            assert p_above(d, low + 1e-6) >= level - 1e-3
            assert p_below(d, high + 1e-9) <= level + 1e-12


def test_equal_pairs_have_a_verdict_and_no_nan() -> None:
    d = np.full(8, 0.1)
    assert p_above(d, 0.05) == 2.0**-8
    assert p_above(d, 0.1) == 1.0
    assert p_above(d, 0.2) == 1.0
    assert lower_bound(d, 0.05) == pytest.approx(0.1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12), st.floats(-0.5, 0.5))
def test_shift_and_mirror(values: list[float], shift: float) -> None:
    d = np.array(values)
    assert p_below(d, 0.0) == p_above(-d, 0.0)
    assert 0 < p_above(d, shift) <= 1
    assert p_above(d, shift) <= p_above(d, shift + 0.1) + 1e-12


def test_leading_axes_are_independent_experiments() -> None:
    d = GENERATOR.normal(size=(3, 4, 7))
    assert p_above(d, 0.0).shape == (3, 4)
    assert p_above(d, 0.0)[1, 2] == pytest.approx(float(p_above(d[1, 2], 0.0)))


def test_holm_by_hand() -> None:
    rejected, levels = holm([0.001, 0.2, 0.012, 0.03], 0.05)
    assert rejected.tolist() == [True, False, True, False]
    assert levels == pytest.approx([0.0125, 0.025, 0.05 / 3, 0.025])
    assert holm([0.04, 0.9], 0.05)[0].tolist() == [False, False]
    assert holm([0.03], 0.05)[0].tolist() == [True]
    assert not holm([0.0039], 0.0)[0].any()


@pytest.mark.parametrize("tail", ["normal", "t3", "laplace"])
@pytest.mark.parametrize("n", [4, 6, 8, 12])
def test_the_level_is_kept(n: int, tail: str) -> None:
    generator = np.random.default_rng(n)
    shape = (20_000, n)
    d = {
        "normal": generator.standard_normal(shape),
        "t3": generator.standard_t(3, shape),
        "laplace": generator.laplace(size=shape),
    }[tail]
    p = p_above(d, 0.0)
    for level in (0.1, 0.05, 0.01):
        # Four standard errors of the simulation itself.
        assert (p <= level).mean() <= level + 4 * (level / len(d)) ** 0.5
