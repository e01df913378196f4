"""Series of loads: a sweep over rates or users, and the search for the highest rate that meets the objectives."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from reports.goodput import within
from reports.schema import CellResult
from server.errors import UserError

MIN_SHARE = 0.99
"""Of the requests, how many must meet every SLO."""
PRECISION = 1.05
_MOST_PROBES = 24
_MIN_RATE = 0.01


class Probe(msgspec.Struct, frozen=True):
    """One rate that was tried."""

    rate: float
    sent_rate: float | None
    """Requests that were sent per second."""
    met: bool
    why: str
    """What it missed by, or its goodput."""


class SearchResult(msgspec.Struct):
    max_rate: float | None
    """Highest rate seen to meet the objectives; None: none did."""
    probes: list[Probe]
    limited_by: str
    """What stopped the search, in words."""

    @property
    def sent_rate(self) -> float | None:
        """Requests that were sent per second at `max_rate`."""
        return next((probe.sent_rate for probe in self.probes if probe.rate == self.max_rate), None)


def parse_values(text: str, option: str) -> list[float]:
    """`1,2,4` as numbers above 0, doubles left out. Raises UserError naming the option."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{option} {text!r}: expected numbers with commas between, as 1,2,4") from None
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise UserError(f"{option} {text!r}: every value must be a number above 0")
    return list(dict.fromkeys(values))


def judge(result: CellResult) -> tuple[bool, str]:
    """Whether a load met its objectives: 99% of the requests within every SLO, and a run that can be trusted."""
    metrics = result.metrics
    if result.status != "ok" or metrics is None:
        return False, result.reason or result.status
    worst = min(metrics.goodput, key=lambda goodput: goodput.share or 0.0)
    share = worst.share or 0.0
    return share >= MIN_SHARE, within(worst)


def find_max_rate(
    run: Callable[[float], CellResult | None], start_rate: float, *, over: Callable[[], bool] = lambda: False
) -> SearchResult:
    """Search the highest rate whose load `judge` accepts; `run` measures one rate (None: stop, it was interrupted).

    `over`: whether no further load can be measured, asked after each.

    From `start_rate` the rate doubles until the objectives are missed, or halves until they are met; then the bracket
    is bisected at its geometric mean until its ends are within 5% of each other. Latency need not be monotonic in the
    rate from one short load to the next: the result is the highest rate that was itself measured to pass, and every
    probe is kept, so that one can see how sharp the edge is.
    """
    probes: list[Probe] = []
    low: float | None = None
    high: float | None = None
    rate = start_rate
    while len(probes) < _MOST_PROBES:
        result = run(rate)
        if result is None:
            return SearchResult(low, probes, "interrupted")
        met, why = judge(result)
        sent_rate = result.metrics.achieved_rate if result.metrics else None
        probes.append(Probe(rate, sent_rate, met, why))
        if over():
            return SearchResult(low, probes, why)
        if met:
            low = rate
        else:
            high = rate
        if high is None:
            rate *= 2
        elif low is None:
            if rate <= _MIN_RATE:
                return SearchResult(None, probes, why)
            rate = max(_MIN_RATE, rate / 2)
        elif high / low <= PRECISION:
            return SearchResult(low, probes, next(probe.why for probe in probes if probe.rate == high))
        else:
            rate = math.sqrt(low * high)
    return SearchResult(low, probes, f"stopped after {_MOST_PROBES} loads")
