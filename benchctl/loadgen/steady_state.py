"""Where a load was in its steady state: after the warm-up transient, before the arrivals ended."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MIN_REQUESTS = 20
_POINTS = 500
_REACHED = 0.9
_SETTLED = 0.3
_LEAST_SENDING = 0.1
"""Of the whole run, how much must pass between the first and the last start."""

Floats = npt.NDArray[np.float64]


def in_flight(starts: Floats, ends: Floats, at: Floats) -> Floats:
    """Requests in flight at each time of `at`: started at or before it, not ended yet. All in one unit."""
    return (
        np.searchsorted(np.sort(starts), at, side="right") - np.searchsorted(np.sort(ends), at, side="right")
    ).astype(np.float64)


def steady_window(starts: Floats, ends: Floats) -> tuple[float, float] | None:
    """(begin, end) of the steady state of a load whose requests ran from `starts` to `ends`; None without one.

    The end is the start of the last request: after it the load only drains. The requests in flight up to there, at 500
    times, have a plateau, the median of the second half; the steady state begins where 90% of it is first reached.
    There is none when the load never settled (the mean of the last quarter differs from that of the third by more than
    30% and two requests: a queue that grows and grows), or when all requests start at about the same time (a burst).

    Statistical truncation rules (MSER-5 and its like) were tried and mistake slow fluctuations of a short load for a
    transient: they cut a third of a Poisson load whose requests last a tenth of it.
    """
    if len(starts) < MIN_REQUESTS:
        return None
    begin, end = float(starts.min()), float(starts.max())
    if end <= begin or end - begin < _LEAST_SENDING * (float(ends.max()) - begin):
        return None
    at = np.linspace(begin, end, _POINTS, endpoint=False)
    level = in_flight(starts, ends, at)
    _, _, third, fourth = (float(quarter.mean()) for quarter in np.split(level, 4))
    if abs(fourth - third) > max(_SETTLED * third, 2.0):
        return None
    reached = level >= _REACHED * float(np.median(level[_POINTS // 2 :]))
    return float(at[int(np.argmax(reached))]), end
