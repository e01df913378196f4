"""Looks and the simulation that the gate's promises rest on (the whole table: scripts/simulate_gate.py)."""

from __future__ import annotations

import numpy as np
import pytest

from benchctl.gate.pairing import run_order
from benchctl.gate.sequential import PASS, REGRESSION, plan_looks, play
from benchctl.gate.statistics import reachable_p
from benchctl.gate.synthetic import History, log_ratios

HISTORIES = [
    History(),
    History(tail="t3"),
    History(tail="outliers"),
    History(autocorrelation=0.6),
    History(drift=3.0),
    History(tail="t3", autocorrelation=0.5, drift=3.0),
    History(step=2.0),
]


@pytest.mark.parametrize("max_pairs", [1, 3, 4, 5, 8, 12, 31])
@pytest.mark.parametrize("metrics", [1, 6, 24])
def test_shares_add_up_to_the_stated_rates(max_pairs: int, metrics: int) -> None:
    looks = plan_looks(min(4, max_pairs), max_pairs, alpha=0.05, beta=0.1, metrics=metrics)
    assert [look.pairs for look in looks] == sorted({look.pairs for look in looks})
    assert looks[-1].pairs == max_pairs
    assert sum(look.alpha for look in looks) <= 0.05 + 1e-12
    assert sum(look.beta for look in looks) <= 0.1 + 1e-12
    for look in looks:
        assert look.alpha == 0 or look.alpha / metrics >= reachable_p(look.pairs)
    if 2.0**-max_pairs <= 0.02 / metrics:
        assert sum(look.alpha for look in looks) == pytest.approx(0.05)


def test_order_is_abba_blocks_turned_by_a_coin() -> None:
    order = run_order(400, seed=3)
    for first, second in zip(order[::2], order[1::2], strict=True):
        assert first == second[::-1]
    starts = [block[0] for block in order[::2]]
    assert 60 < starts.count("baseline") < 140
    assert run_order(7, seed=3) == order[:7]
    assert run_order(400, seed=4) != order


@pytest.mark.parametrize("history", HISTORIES)
def test_false_alarms_stay_below_alpha_where_noise_is_all_there_is(history: History) -> None:
    d = log_ratios(history, (1500, 6, 8), noise=5.0, effects=np.zeros(6), generator=np.random.default_rng(1))
    looks = plan_looks(4, 8, alpha=0.05, beta=0.1, metrics=6)
    outcome, _ = play(d, np.ones(6), looks)
    assert (outcome == REGRESSION).mean() <= 0.05


@pytest.mark.parametrize("history", HISTORIES)
def test_a_slowdown_of_just_the_minimum_effect_is_no_regression(history: History) -> None:
    d = log_ratios(history, (1500, 6, 8), noise=0.5, effects=np.ones(6), generator=np.random.default_rng(2))
    outcome, _ = play(d, np.ones(6), plan_looks(4, 8, alpha=0.05, beta=0.1, metrics=6))
    assert (outcome == REGRESSION).mean() <= 0.06


@pytest.mark.parametrize("history", HISTORIES)
def test_twice_the_minimum_effect_is_found_with_eight_pairs(history: History) -> None:
    d = log_ratios(history, (1000, 6, 8), noise=0.5, effects=np.full(6, 2.0), generator=np.random.default_rng(3))
    outcome, _ = play(d, np.ones(6), plan_looks(4, 8, alpha=0.05, beta=0.1, metrics=6))
    assert (outcome == REGRESSION).mean() >= 0.9
    assert (outcome == PASS).mean() <= 0.1


@pytest.mark.parametrize("history", HISTORIES)
def test_plain_answers_end_early(history: History) -> None:
    looks = plan_looks(4, 12, alpha=0.05, beta=0.1, metrics=6)
    generator = np.random.default_rng(4)
    same = log_ratios(history, (500, 6, 12), noise=0.25, effects=np.zeros(6), generator=generator)
    outcome, used = play(same, np.ones(6), looks)
    assert (outcome == PASS).mean() > 0.95
    assert used.mean() < 5
    slow = log_ratios(history, (500, 6, 12), noise=0.25, effects=np.full(6, 4.0), generator=generator)
    outcome, used = play(slow, np.ones(6), looks)
    assert (outcome == REGRESSION).all()
    assert used.mean() < 9


def test_abba_cancels_a_linear_drift() -> None:
    d = log_ratios(History(drift=20.0), (50, 1, 8), noise=1e-6, effects=np.zeros(1), generator=np.random.default_rng(5))
    assert np.abs(d).max() > 1e-6
    assert np.abs(d.mean(axis=-1)).max() < 5e-6
