"""What a gate can do on this machine, learnt from pairs of runs of the same code (A/A)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from benchctl.gate.runs import Run
from benchctl.gate.samples import Comparison, gated_comparisons
from benchctl.gate.sequential import PASS, PASS_MULTIPLE, REGRESSION, plan_looks, play
from benchctl.gate.settings import GateSettings, relative_change
from benchctl.gate.statistics import Array
from benchctl.gate.validity import invalid_reasons
from server.errors import UserError

EXPERIMENTS = 2000
POWER = 0.9
MIN_PAIRS = 4
_LARGEST_LOG_EFFECT = 3.0
_STEP = 0.005


class MetricCalibration(msgspec.Struct, kw_only=True):
    """One gated metric of one cell."""

    cell_id: str
    metric: str
    label: str
    noise: float
    """Standard deviation of a pair's log ratio."""
    min_effect: float
    detectable: dict[str, float | None]
    """Number of pairs -> the smallest slowdown (a share of the baseline) that is found with probability `POWER` at
    the present minimum effect; null: none is, however large."""
    suggested: float | None
    """The smallest minimum effect whose double is found with probability `POWER` within `max_pairs`."""


class Calibration(msgspec.Struct, kw_only=True):
    """What A/A pairs say about the gate."""

    pairs: int
    max_pairs: int
    alpha: float
    false_alarm_rate: float
    """Share of resampled A/A gates that ended as a regression."""
    pass_rate: float
    inconclusive_rate: float
    mean_pairs: float
    """Pairs that such a gate takes."""
    metrics: list[MetricCalibration]
    problems: list[str] = []
    """Why some of the runs would have made a gate inconclusive."""


def calibrate(pairs: Sequence[tuple[Run, Run]], settings: GateSettings, *, seed: int = 0) -> Calibration:
    """Resample A/A pairs into many gates. Raises UserError with fewer than `MIN_PAIRS` pairs or nothing measured."""
    if len(pairs) < MIN_PAIRS:
        raise UserError(f"--calibrate: {len(pairs)} pairs are too few; at least {MIN_PAIRS}, better 10 (--max-pairs)")
    comparisons = [one for one in gated_comparisons(pairs, settings) if len(one.log_ratios) == len(pairs)]
    if not comparisons:
        raise UserError("--calibrate: no gated metric was measured in every run")
    observed = np.array([one.log_ratios for one in comparisons])
    effects = np.array([one.log_min_effect for one in comparisons])
    generator = np.random.default_rng(seed)
    looks = plan_looks(
        settings.min_pairs, settings.max_pairs, alpha=settings.alpha, beta=settings.beta, metrics=len(comparisons)
    )
    outcome, used = play(resample(observed, settings.max_pairs, generator), effects, looks)
    return Calibration(
        pairs=len(pairs),
        max_pairs=settings.max_pairs,
        alpha=settings.alpha,
        false_alarm_rate=float((outcome == REGRESSION).mean()),
        pass_rate=float((outcome == PASS).mean()),
        inconclusive_rate=float(((outcome != PASS) & (outcome != REGRESSION)).mean()),
        mean_pairs=float(used.mean()),
        metrics=[
            _metric(one, observed[[i]], settings, len(comparisons), generator) for i, one in enumerate(comparisons)
        ],
        problems=invalid_reasons(pairs),
    )


def resample(observed: Array, pairs: int, generator: np.random.Generator, experiments: int = EXPERIMENTS) -> Array:
    """A/A gates drawn from observed log ratios (metrics, n): shape (experiments, metrics, pairs).

    Pairs are drawn with replacement, whole, so that metrics keep their dependence; their signs are free, as nothing
    differs between the sides; and a little normal noise of the right size keeps a small sample from repeating itself
    (the smoothed bootstrap with Silverman's bandwidth, shrunk so that the variance stays).
    """
    n = observed.shape[1]
    chosen = observed[:, generator.integers(0, n, size=(experiments, pairs))].transpose(1, 0, 2)
    signs = np.where(generator.random((experiments, 1, pairs)) < 0.5, -1.0, 1.0)
    scale = np.sqrt((observed**2).mean(axis=1))[:, None]
    width = (4 / (3 * n)) ** 0.2
    smooth = width * scale * generator.standard_normal(chosen.shape)
    return np.asarray((chosen * signs + smooth) / np.sqrt(1 + width**2))


def _metric(
    one: Comparison, observed: Array, settings: GateSettings, family: int, generator: np.random.Generator
) -> MetricCalibration:
    counts = sorted({count for count in (6, 8, 12, settings.max_pairs) if count <= settings.max_pairs})
    detectable: dict[str, float | None] = {}
    for count in counts:
        drawn = resample(observed, count, generator)
        effect = _smallest(partial(_found_at, drawn, one.log_min_effect, settings, family))
        detectable[str(count)] = None if effect is None else abs(relative_change(one.metric, effect))
    drawn = resample(observed, settings.max_pairs, generator)
    least = _smallest(lambda size: _found(drawn + PASS_MULTIPLE * size, size, settings, family))
    suggested = None if least is None else abs(relative_change(one.metric, least))
    return MetricCalibration(
        cell_id=one.cell_id,
        metric=one.metric.key,
        label=one.metric.label,
        noise=float(np.sqrt((observed**2).mean())),
        min_effect=one.min_effect,
        detectable=detectable,
        suggested=None if suggested is None else float(np.ceil(suggested / _STEP) * _STEP),
    )


def _found_at(drawn: Array, min_effect: float, settings: GateSettings, family: int, effect: float) -> float:
    return _found(drawn + effect, min_effect, settings, family)


def _found(d: Array, min_effect: float, settings: GateSettings, family: int) -> float:
    """Share of the experiments in which this one metric of `family` ends as a regression."""
    pairs = d.shape[-1]
    looks = plan_looks(
        min(settings.min_pairs, pairs), pairs, alpha=settings.alpha / family, beta=settings.beta, metrics=1
    )
    return float((play(d, np.array([min_effect]), looks)[0] == REGRESSION).mean())


def _smallest(found: Callable[[float], float]) -> float | None:
    """The smallest log effect at which `found(effect)` reaches `POWER`, by bisection; None when none does."""
    low, high = 0.0, _LARGEST_LOG_EFFECT
    if found(high) < POWER:
        return None
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) >= POWER else (middle, high)
    return high
