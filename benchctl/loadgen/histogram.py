"""Exact statistics of very many gaps in memory that does not grow with their number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from reports.schema import PERCENTILES, Distribution

_DENSE_US = 1 << 22
"""Gaps below 4.2 s are counted per microsecond (32 MiB at most); the few longer ones are kept one by one."""


class GapHistogram:
    """Counts of gaps in whole microseconds, the resolution of the raw records: nothing is approximated."""

    def __init__(self) -> None:
        self._counts = np.zeros(1024, np.int64)
        self._long: list[npt.NDArray[np.int64]] = []

    def add(self, gaps_us: npt.NDArray[np.int64], weights: npt.NDArray[np.int64] | None = None) -> None:
        """Count gaps (not negative), each `weights` times (default once)."""
        if weights is None:
            weights = np.ones(len(gaps_us), np.int64)
        short = gaps_us < _DENSE_US
        if not short.all():
            self._long.append(np.repeat(gaps_us[~short], weights[~short]))
            gaps_us, weights = gaps_us[short], weights[short]
        if not len(gaps_us):
            return
        counts = np.bincount(gaps_us, weights).astype(np.int64)
        if len(counts) > len(self._counts):
            self._counts = np.pad(self._counts, (0, min(_DENSE_US, 2 * len(counts)) - len(self._counts)))
        self._counts[: len(counts)] += counts

    def distribution(self, reason: str) -> Distribution:
        """In seconds; null with `reason` when nothing was counted."""
        values = np.flatnonzero(self._counts)
        counts = self._counts[values]
        if self._long:
            longer, how_often = np.unique(np.concatenate(self._long), return_counts=True)
            values, counts = np.concatenate([values, longer]), np.concatenate([counts, how_often])
        n = int(counts.sum())
        if n == 0:
            return Distribution(n=0, reason=reason)
        seconds = values / 1e6
        mean = float((seconds * counts).sum() / n)
        ends = np.cumsum(counts)
        # numpy's linear interpolation, between the values at the two neighbouring ranks.
        ranks = np.array(PERCENTILES) / 100 * (n - 1)
        low = seconds[np.searchsorted(ends, np.floor(ranks), side="right")]
        high = seconds[np.searchsorted(ends, np.ceil(ranks), side="right")]
        points = low + (high - low) * (ranks - np.floor(ranks))
        return Distribution(
            n=n,
            mean=mean,
            std=float(np.sqrt((counts * (seconds - mean) ** 2).sum() / n)),
            min=float(seconds[0]),
            max=float(seconds[-1]),
            percentiles={f"p{p:g}": float(point) for p, point in zip(PERCENTILES, points, strict=True)},
        )
