"""Medians and spread over repeated starts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from reports.schema import StartupReport
from reports.startup_phases import UNACCOUNTED, stacked_phases

KINDS = ("cold", "warm")


class Spread(msgspec.Struct, frozen=True):
    """A quantity over the starts of one kind, seconds."""

    median: float
    low: float
    high: float
    n: int


class PhaseRow(msgspec.Struct, frozen=True):
    """One phase of a start; kinds in which it did not occur are missing."""

    phase: str
    seconds: dict[str, Spread]


class Summary(msgspec.Struct, frozen=True):
    to_healthy: dict[str, Spread]
    to_first_token: dict[str, Spread]
    unaccounted: dict[str, Spread]
    """Part of the time to healthy that no process was in a recorded phase."""
    phases: list[PhaseRow]
    """Every instant of a start belongs to one phase, so the medians add up to about the time to the first token."""

    def unaccounted_share(self, kind: str) -> float | None:
        """Median unaccounted time as a share of the median time to healthy."""
        if kind not in self.unaccounted or kind not in self.to_healthy:
            return None
        return self.unaccounted[kind].median / self.to_healthy[kind].median


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def summarize(reports: Sequence[StartupReport]) -> Summary:
    """Per kind; values that a server did not report are left out."""
    by_kind = {kind: [report for report in reports if report.kind == kind] for kind in KINDS}
    stacked = {kind: [stacked_phases(report) for report in starts] for kind, starts in by_kind.items()}
    rows = []
    for phase in _in_order([phases for starts in stacked.values() for phases in starts]):
        # A phase that one of the repeats did not have took no time in it.
        seconds = {
            kind: spread([phases.get(phase, 0.0) for phases in starts])
            for kind, starts in stacked.items()
            if any(phase in phases for phases in starts)
        }
        rows.append(PhaseRow(phase, seconds))
    return Summary(
        to_healthy=_spreads(by_kind, lambda report: report.to_healthy_s),
        to_first_token=_spreads(by_kind, lambda report: report.to_first_token_s),
        unaccounted=_spreads(by_kind, lambda report: report.unaccounted_s),
        phases=rows,
    )


def _spreads(
    by_kind: dict[str, list[StartupReport]], value: Callable[[StartupReport], float | None]
) -> dict[str, Spread]:
    known = {kind: [v for r in starts if (v := value(r)) is not None] for kind, starts in by_kind.items()}
    return {kind: spread(values) for kind, values in known.items() if values}


def _in_order(starts: Sequence[dict[str, float]]) -> list[str]:
    """Phases in the order in which the starts went through them, what is unaccounted last."""
    order: list[str] = []
    for phases in starts:
        position = 0
        for phase in phases:
            if phase in order:
                position = order.index(phase) + 1
            else:
                order.insert(position, phase)
                position += 1
    return [*(phase for phase in order if phase != UNACCOUNTED), *((UNACCOUNTED,) if UNACCOUNTED in order else ())]
