"""When to look, how much error each look may spend, and what a look decides.

Looks are after whole ABBA blocks (two pairs), from `min_pairs` to `max_pairs`. Each look spends its own share of the
error rates, and the shares add up to the stated rate. By the union bound the rates hold whatever the dependence
between looks and between metrics:

- a false alarm on any gated metric, with no real slowdown beyond its minimum effect: at most `alpha` in all;
- a pass although some metric is slower by twice its minimum effect or more: at most `beta` in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchctl.gate.statistics import Array, center, holm, p_above, p_below, reachable_p

# Cumulative share of the error rate spent at information fraction t is t^power (Kim and DeMets 1987). Regressions
# spend evenly; passes spend early, so that a plain A/A ends after four of twelve pairs.
ALPHA_POWER = 1.0
BETA_POWER = 0.4
PASS_MULTIPLE = 2.0
"""A pass rules out slowdowns of this many minimum effects: those that the gate promises to catch."""


@dataclass(frozen=True, slots=True)
class Look:
    """One planned look at the data, with the error that it may spend."""

    pairs: int
    alpha: float
    """Family-wise level for regressions; 0: this many pairs could not show one, nothing is spent."""
    beta: float
    """Level per metric for ruling out a large slowdown; 0: as above."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What one look says; arrays over (..., metrics)."""

    regressed: npt.NDArray[Any]
    cleared: npt.NDArray[Any]
    """The estimate is below the minimum effect and a slowdown of `PASS_MULTIPLE` of it is ruled out."""
    p: Array
    """Against "not slower than the minimum effect"."""
    level: Array
    """At which each p was tested (Holm)."""

    @property
    def any_regressed(self) -> npt.NDArray[Any]:
        return np.asarray(self.regressed.any(axis=-1))

    @property
    def all_cleared(self) -> npt.NDArray[Any]:
        return np.asarray(self.cleared.all(axis=-1))


def plan_looks(min_pairs: int, max_pairs: int, *, alpha: float, beta: float, metrics: int) -> list[Look]:
    """Looks after every second pair from `min_pairs` on, the last at `max_pairs`.

    A look at which no p value could be small enough tests nothing, and its share goes to the next one.
    """
    counts = [*range(min_pairs, max_pairs, 2), max_pairs]
    looks = []
    spent_alpha = spent_beta = 0.0
    for pairs in counts:
        share = pairs / max_pairs
        look_alpha = alpha * share**ALPHA_POWER - spent_alpha
        look_beta = beta * share**BETA_POWER - spent_beta
        if look_alpha / max(metrics, 1) < reachable_p(pairs):
            look_alpha = 0.0
        if look_beta < reachable_p(pairs):
            look_beta = 0.0
        spent_alpha += look_alpha
        spent_beta += look_beta
        looks.append(Look(pairs, look_alpha, look_beta))
    return looks


def decide(d: Array, min_effects: Array, look: Look) -> Decision:
    """Judge log ratios `d` of shape (..., metrics, pairs) against `min_effects` (log ratios, shape (metrics,))."""
    p = p_above(d, min_effects)
    regressed, level = holm(p, look.alpha)
    small = center(d) < min_effects
    ruled_out = p_below(d, PASS_MULTIPLE * min_effects) <= look.beta
    return Decision(regressed=regressed, cleared=small & ruled_out, p=p, level=level)


UNDECIDED, REGRESSION, PASS = 0, 1, 2


def play(d: Array, min_effects: Array, looks: list[Look]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Run the whole sequential gate over experiments `d` of shape (..., metrics, max_pairs).

    Returns (outcome, pairs used), both of shape (...): the first look that decides ends an experiment.
    """
    outcome = np.full(d.shape[:-2], UNDECIDED)
    used = np.full(d.shape[:-2], looks[-1].pairs)
    for look in looks:
        decision = decide(d[..., : look.pairs], min_effects, look)
        now = np.where(decision.any_regressed, REGRESSION, np.where(decision.all_cleared, PASS, UNDECIDED))
        first = (outcome == UNDECIDED) & (now != UNDECIDED)
        outcome = np.where(first, now, outcome)
        used = np.where(first, look.pairs, used)
    return outcome, used
