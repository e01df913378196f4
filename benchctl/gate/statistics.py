"""Evidence from paired server runs: p values and bounds for the typical log ratio of a pair.

Everything takes `d` of shape (..., n): the log ratios of n pairs, positive where the candidate is worse. Leading
axes are independent experiments, so that a simulation and a single gate run the same code.

Below `EXACT_BELOW` pairs the test is the exact sign-flip permutation of the mean (Fisher 1935), whose interval ends
are means of subsets of the sample (Hartigan 1969). From there on it is the median, studentised by its bootstrap
standard error. The bootstrap law of a median is computed in closed form (Hutson and Ernst 2000), so nothing is drawn
at random and a verdict can be reproduced from the results alone.

Percentile and BCa intervals of the median err up to twice as often as they state with 6 to 16 pairs; the studentised
one keeps its level (`scripts/simulate_gate.py --intervals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special, stats

EXACT_BELOW = 6
"""From this many pairs on, the median and its bootstrap replace the permutation test."""

Array = npt.NDArray[np.float64]


def reachable_p(n: int) -> float:
    """The smallest one-sided p value that n pairs can give: all of them on one side has probability 2^-n."""
    return float(2.0**-n)


def center(d: Array) -> Array:
    """The estimate that the bounds belong to: mean below `EXACT_BELOW` pairs, else median. Shape (...)."""
    return np.asarray(d.mean(axis=-1) if d.shape[-1] < EXACT_BELOW else np.median(d, axis=-1))


def p_above(d: Array, threshold: float | Array) -> Array:
    """One-sided p value against "the typical log ratio is at most `threshold`" (shape (...) or a scalar)."""
    n = d.shape[-1]
    limit = np.asarray(threshold, dtype=np.float64)
    if n < EXACT_BELOW:
        # Flipping the signs of a subset raises the sum exactly when the subset's mean is at or below the threshold;
        # flipping nothing is one of the 2^n outcomes.
        return np.asarray((1 + (subset_means(d) <= limit[..., None]).sum(axis=-1)) / 2.0**n)
    middle, error = studentised(d)
    gap = middle - limit
    # Pairs that all agree have no error: infinitely clear unless they lie on the threshold.
    t = np.where(error > 0, gap / np.where(error > 0, error, 1.0), np.where(gap > 0, np.inf, -np.inf))
    p = special.stdtr(degrees_of_freedom(n), -t)
    # Without this floor a lucky narrow sample of six would claim what no six pairs can show free of assumptions.
    return np.maximum(p, reachable_p(n))


def p_below(d: Array, threshold: float | Array) -> Array:
    """One-sided p value against "the typical log ratio is at least `threshold`"."""
    return p_above(-d, -np.asarray(threshold, dtype=np.float64))


def lower_bound(d: Array, level: float) -> Array:
    """The threshold up to which `p_above` is at most `level`; -inf where n pairs cannot reach `level`."""
    n = d.shape[-1]
    if level < reachable_p(n):
        return np.full(d.shape[:-1], -np.inf)
    if n < EXACT_BELOW:
        rank = min(int(np.floor(level * 2.0**n + 1e-9)), 2**n - 1)
        return np.asarray(np.sort(subset_means(d), axis=-1)[..., rank - 1])
    middle, error = studentised(d)
    return np.asarray(middle - stats.t.isf(level, degrees_of_freedom(n)) * error)


def upper_bound(d: Array, level: float) -> Array:
    """The mirror image of `lower_bound`."""
    return -lower_bound(-d, level)


def studentised(d: Array) -> tuple[Array, Array]:
    """(median, bootstrap standard error of the median), each of shape (...)."""
    left, right, weight = bootstrap_medians(d.shape[-1])
    ordered = np.sort(d, axis=-1)
    medians = (ordered[..., left] + ordered[..., right]) / 2
    middle = np.median(d, axis=-1)
    variance = ((medians - middle[..., None]) ** 2) @ weight
    return np.asarray(middle), np.sqrt(variance)


def degrees_of_freedom(n: int) -> float:
    """Degrees of freedom of the t law that the studentised median is referred to.

    The variance estimate of a median converges like n^-1/2 only, so its degrees of freedom grow like sqrt(n). The
    factor is the largest at which the simulation keeps the level for normal and heavier tails down to 0.0005.
    """
    return min(n - 1.0, 2.5 * n**0.5)


@cache
def subset_matrix(n: int) -> Array:
    """(2^n - 1, n): each row averages one non-empty subset of n values."""
    members = ((np.arange(1, 2**n)[:, None] >> np.arange(n)) & 1).astype(np.float64)
    return np.asarray(members / members.sum(axis=1, keepdims=True))


def subset_means(d: Array) -> Array:
    """Means of all non-empty subsets, shape (..., 2^n - 1)."""
    return np.asarray(d @ subset_matrix(d.shape[-1]).T)


@cache
def bootstrap_medians(n: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Array]:
    """The bootstrap law of the median of n values: it is the mean of the order statistics `left` and `right`
    (0-based) with probability `weight`.
    """
    if n % 2:
        # The median is at most the k-th value when more than half of the draws are.
        at_most = stats.binom.sf(n // 2, n, np.arange(1, n + 1) / n)
        index = np.arange(n)
        return index, index, np.diff(np.concatenate([[0.0], at_most]))
    half = n // 2
    left, right = (np.asarray(index) for index in np.triu_indices(n))
    # Two different middles: exactly half of the draws at or below the left one, which is drawn at least once; the
    # other half at or above the right one.
    reach_left = ((left + 1) / n) ** half - (left / n) ** half
    reach_right = ((n - right) / n) ** half - ((n - 1 - right) / n) ** half
    weight = special.comb(n, half) * reach_left * reach_right
    same = left == right
    weight[same] = [_both_middles(n, int(k)) for k in left[same]]
    return left, right, weight


def _both_middles(n: int, k: int) -> float:
    """Probability that fewer than half of n draws fall below the k-th value, and fewer than half above it."""
    counts = np.arange(n // 2)
    below, above = counts[:, None], counts[None, :]
    log_ways = special.gammaln(n + 1) - sum(special.gammaln(count + 1) for count in (below, above, n - below - above))
    chance = (k / n) ** below * ((n - 1 - k) / n) ** above * (1 / n) ** (n - below - above)
    return float((np.exp(log_ways) * chance).sum())


def holm(p_values: Sequence[float] | Array, alpha: float | Array) -> tuple[npt.NDArray[Any], Array]:
    """Holm's step-down test over the last axis: (rejected, the level at which each hypothesis was tested).

    The family-wise error is at most `alpha` whatever the dependence between the metrics. A hypothesis behind the
    first that stands is shown at that one's level, which is the level its own bound would have had to pass.
    """
    p = np.asarray(p_values, dtype=np.float64)
    m = p.shape[-1]
    order = np.argsort(p, axis=-1, kind="stable")
    levels = np.asarray(alpha)[..., None] / (m - np.arange(m))
    passed = np.logical_and.accumulate(np.take_along_axis(p, order, axis=-1) <= levels, axis=-1)
    stopped_at = np.minimum(passed.sum(axis=-1, keepdims=True), m - 1)
    shown = np.where(passed, levels, np.take_along_axis(np.broadcast_to(levels, p.shape), stopped_at, axis=-1))
    rejected = np.zeros(p.shape, dtype=bool)
    level_of = np.zeros(p.shape)
    np.put_along_axis(rejected, order, passed, axis=-1)
    np.put_along_axis(level_of, order, shown, axis=-1)
    return rejected, level_of
