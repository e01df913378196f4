"""A metric over commits, cut at the points where it changed for good."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import ruptures
from scipy import ndimage, stats

from benchctl.history.record import Record
from reports.metrics import Metric

MIN_SEGMENT = 2
"""Commits on each side of a change point: a single odd measurement is none."""
# Pelt adds a change point when it explains this many noise variances times log n. A change of the mean costs two
# parameters, so that 2 is what BIC asks for; heavier tails than normal need more. At 5 fewer than 5% of stable
# histories of 20 to 200 commits show any change point (tests/unit/history/test_series.py).
PENALTY = 5.0
SIGNIFICANCE = 0.05
"""Of the rank test that a change point must pass between the stretches on its two sides, where these are long enough
to reach it."""


@dataclass(frozen=True, slots=True)
class Point:
    """A commit's value: the median over its measurements."""

    commit: str
    time: str
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """The level changed between two neighbouring measured commits."""

    index: int
    """Of the first point at the new level."""
    before: str
    """Last measured commit at the old level."""
    after: str
    change: float
    """New level / old level - 1, of the medians of the stretches on both sides."""


@dataclass(slots=True)
class Series:
    """One metric of one cell on one machine."""

    cell_id: str
    machine: str
    metric: Metric
    points: list[Point]
    changes: list[ChangePoint] = field(default_factory=list)

    @property
    def stretches(self) -> list[Sequence[Point]]:
        """The points between change points."""
        cuts = [0, *(change.index for change in self.changes), len(self.points)]
        return [self.points[a:b] for a, b in itertools.pairwise(cuts)]

    def worse(self, change: ChangePoint) -> bool:
        return (change.change < 0) == self.metric.higher_is_better


def build_series(records: Iterable[Record], metric: Metric, cell: str | None = None) -> list[Series]:
    """Series of `metric` with their change points; `cell` keeps those whose id contains the text."""
    grouped: dict[tuple[str, str, str], dict[str, list[Record]]] = {}
    for record in sorted(records, key=lambda record: record.order):
        if record.metrics.get(metric.key) is not None and (cell is None or cell in record.cell_id):
            grouped.setdefault(record.series, {}).setdefault(record.commit, []).append(record)
    found = []
    for (cell_id, _, machine), commits in grouped.items():
        points = [
            Point(commit, members[0].order[0], tuple(member.metrics[metric.key] for member in members))
            for commit, members in commits.items()
        ]
        series = Series(cell_id, machine, metric, points)
        series.changes = change_points(points)
        found.append(series)
    return found


def change_points(points: Sequence[Point]) -> list[ChangePoint]:
    """Where the level of a series changed for good (Pelt, Killick et al. 2012, on logarithms)."""
    values = [point.value for point in points]
    if len(values) < 2 * MIN_SEGMENT or min(values) <= 0:
        return []
    cuts = cut(np.log(values))
    edges = [0, *cuts, len(values)]
    found = []
    for start, at, end in zip(edges, cuts, edges[2:], strict=False):
        old, new = statistics.median(values[start:at]), statistics.median(values[at:end])
        found.append(ChangePoint(at, points[at - 1].commit, points[at].commit, new / old - 1))
    return found


def cut(logs: np.ndarray) -> list[int]:
    """Indices at which a new level starts."""
    noise = noise_level(logs)
    if noise == 0:
        # Like values to the last digit: any difference is a change, and every unit of noise serves.
        noise = 1e-9
    # The linear kernel is the squared distance from the mean, by the same algorithm as ruptures' Pelt but in C.
    detector = ruptures.KernelCPD(kernel="linear", min_size=MIN_SEGMENT)
    cuts = detector.fit(without_spikes(logs, noise) / noise).predict(pen=PENALTY * math.log(len(logs)))
    kept = list(cuts[:-1])
    # The rank test does not see how far away one outlier is, so that two odd commits in a row do not pass.
    while kept:
        edges = [0, *kept, len(logs)]
        doubts = [_doubt(logs[a:b], logs[b:c]) for a, b, c in zip(edges, edges[1:], edges[2:], strict=False)]
        if max(doubts) <= SIGNIFICANCE:
            break
        del kept[int(np.argmax(doubts))]
    return kept


def without_spikes(logs: np.ndarray, noise: float) -> np.ndarray:
    """Every value brought within three noises of the median of its five neighbours (Hampel's filter)."""
    middle = ndimage.median_filter(logs, size=5, mode="nearest")
    return np.asarray(np.clip(logs, middle - 3 * noise, middle + 3 * noise))


def noise_level(logs: np.ndarray) -> float:
    """Standard deviation of the noise from the differences of neighbours, which a few level changes do not move.

    The median absolute difference, scaled for the normal law (0.6745) and for a difference having twice the variance.
    """
    return float(np.median(np.abs(np.diff(logs))) / (0.6744897501960817 * math.sqrt(2)))


def _doubt(before: np.ndarray, after: np.ndarray) -> float:
    """p value of the rank test between two stretches; 0 where they are too short for it to reach `SIGNIFICANCE`."""
    if 2 / math.comb(len(before) + len(after), len(before)) > SIGNIFICANCE:
        return 0.0
    return float(stats.mannwhitneyu(before, after, alternative="two-sided").pvalue)
