"""Made-up histories of server runs, to see what the gate does where the truth is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchctl.gate.statistics import Array

Tail = Literal["normal", "t3", "outliers"]
_OUTLIER_SHARE, _OUTLIER_SIZE = 0.05, 5.0


@dataclass(frozen=True, slots=True)
class History:
    """How a machine behaves over the runs of one gate. Sizes are multiples of the noise of a pair."""

    tail: Tail = "normal"
    """Law of a run's noise: normal; Student t with 3 degrees of freedom; or normal with one run in twenty 5 x off."""
    autocorrelation: float = 0.0
    """Between successive runs (AR(1)); the noise's size stays."""
    drift: float = 0.0
    """How far the machine drifts, in a straight line, from the first run to the last."""
    step: float = 0.0
    """Size of a lasting change of the machine's speed at a random run."""
    shared: float = 0.5
    """Share of the noise's variance that all metrics of a run have in common."""


def log_ratios(
    history: History, shape: tuple[int, int, int], *, noise: float, effects: Array, generator: np.random.Generator
) -> Array:
    """Log ratios (candidate over baseline) of shape (experiments, metrics, pairs).

    `noise` is the standard deviation of a pair's log ratio, `effects` (metrics,) the true log ratio of each metric.
    Runs follow each other in ABBA blocks that a coin turns, as in a real gate.
    """
    experiments, metrics, pairs = shape
    runs = 2 * pairs
    common = _noise(history, (experiments, 1, runs), generator)
    own = _noise(history, (experiments, metrics, runs), generator)
    values = np.sqrt(history.shared) * common + np.sqrt(1 - history.shared) * own
    values *= noise / np.sqrt(2)  # a pair's log ratio is the difference of two runs
    values += history.drift * noise * np.linspace(0, 1, runs)
    if history.step:
        at = generator.integers(1, runs, size=(experiments, 1, 1))
        values += history.step * noise * (np.arange(runs) >= at)
    first, second = values[..., 0::2], values[..., 1::2]
    candidate_second = _candidate_second(experiments, pairs, generator)[:, None, :]
    return np.where(candidate_second, second - first, first - second) + effects[:, None]


def _candidate_second(experiments: int, pairs: int, generator: np.random.Generator) -> npt.NDArray[np.bool_]:
    coin = generator.random((experiments, (pairs + 1) // 2)) < 0.5
    return np.stack([coin, ~coin], axis=-1).reshape(experiments, -1)[:, :pairs]


def _noise(history: History, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Noise of standard deviation 1, autocorrelated along the last axis."""
    if history.tail == "t3":
        draws = generator.standard_t(3, shape) / np.sqrt(3)
    else:
        draws = generator.standard_normal(shape)
        if history.tail == "outliers":
            draws *= np.where(generator.random(shape) < _OUTLIER_SHARE, _OUTLIER_SIZE, 1.0)
            draws /= np.sqrt(1 + _OUTLIER_SHARE * (_OUTLIER_SIZE**2 - 1))
    rho = history.autocorrelation
    for run in range(1, shape[-1]):
        draws[..., run] = rho * draws[..., run - 1] + np.sqrt(1 - rho**2) * draws[..., run]
    return draws
