"""Where a load was in its steady state: after the warm-up transient, before the arrivals ended."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MIN_REQUESTS = 20
_POINTS = 500
_BATCH = 5

Floats = npt.NDArray[np.float64]


def in_flight(starts: Floats, ends: Floats, at: Floats) -> Floats:
    """Requests in flight at each time of `at`: started at or before it, not ended yet. All in one unit."""
    return (
        np.searchsorted(np.sort(starts), at, side="right") - np.searchsorted(np.sort(ends), at, side="right")
    ).astype(np.float64)


def steady_window(starts: Floats, ends: Floats) -> tuple[float, float] | None:
    """(begin, end) of the steady state of a load whose requests ran from `starts` to `ends`; None without one.

    The end is the start of the last request: after it the load only drains. The beginning is found with MSER-5 (White,
    "An effective truncation heuristic for bias reduction in simulation output", Simulation 69(6), 1997) on the number
    of requests in flight, sampled at 500 times up to there and averaged in batches of 5: of the truncation points in
    the first half, the one that makes the standard error of the mean of the rest smallest. If that is the half itself
    the load never settled (a queue that grows and grows); a load whose requests all start at once has no steady state.
    """
    if len(starts) < MIN_REQUESTS:
        return None
    begin, end = float(starts.min()), float(starts.max())
    if end <= begin or end - begin < 0.1 * (float(ends.max()) - begin):
        return None
    at = np.linspace(begin, end, _POINTS, endpoint=False)
    batches = in_flight(starts, ends, at).reshape(-1, _BATCH).mean(axis=1)
    cut = _mser(batches)
    if cut is None:
        return None
    return float(at[cut * _BATCH]), end


def _mser(series: Floats) -> int | None:
    """Truncation point within the first half that minimises var(rest) / len(rest); None when it is the half itself."""
    n = len(series)
    remaining = np.arange(n, 0, -1, dtype=np.float64)
    sums = np.cumsum(series[::-1])[::-1]
    squares = np.cumsum((series**2)[::-1])[::-1]
    variance = np.maximum(squares / remaining - (sums / remaining) ** 2, 0)
    half = n // 2
    best = int(np.argmin((variance / remaining)[:half]))
    return best if best < half - 1 else None
