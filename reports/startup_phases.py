"""Start-up phases that add up: every instant of a start is given to exactly one phase.

A server's processes start side by side, so the durations of their phases sum to more than the wall time. For a
stacked bar each instant goes to the innermost phase that is running in the process that matters most at that time:
the worker (it takes longest), then the engine, the API server, the supervisor, the client. What nobody claims is
`unaccounted`.
"""

from __future__ import annotations

import bisect

from reports.schema import CellResult, PhaseTime, StartupReport

UNACCOUNTED = "unaccounted"
_ORDER = ("worker", "engine", "api", "supervisor", "client")


def stacked_phases(report: StartupReport) -> dict[str, float]:
    """Seconds per phase, in order of first appearance; the values sum to `to_first_token_s`.

    Phases are named by the first two parts of their path. Empty when the engine reports no phases or never answered.
    """
    end_s = report.to_first_token_s
    if end_s is None or not any(phase.process != "client" for phase in report.phases):
        return {}
    leaves = _leaves(report.phases)
    cuts = sorted({0.0, end_s, *(_clip(t, end_s) for p in leaves for t in (p.start_s, p.start_s + p.duration_s))})
    owners: list[tuple[int, float, str] | None] = [None] * (len(cuts) - 1)
    for phase in leaves:
        rank = (_rank(phase.process), -phase.start_s, short_name(phase.name))
        first = bisect.bisect_left(cuts, _clip(phase.start_s, end_s))
        last = bisect.bisect_left(cuts, _clip(phase.start_s + phase.duration_s, end_s))
        for piece in range(first, last):
            owner = owners[piece]
            if owner is None or rank < owner:
                owners[piece] = rank
    stacked: dict[str, float] = {}
    for piece, owner in enumerate(owners):
        name = owner[2] if owner else UNACCOUNTED
        stacked[name] = stacked.get(name, 0.0) + cuts[piece + 1] - cuts[piece]
    if UNACCOUNTED in stacked:
        stacked[UNACCOUNTED] = stacked.pop(UNACCOUNTED)
    return stacked


def short_name(name: str) -> str:
    return "/".join(name.split("/")[:2])


def _leaves(phases: list[PhaseTime]) -> list[PhaseTime]:
    """Phases that no other phase of their process refines (a parent would hide the gaps between its parts)."""
    parents = {
        (phase.process, "/".join(phase.name.split("/")[:depth]))
        for phase in phases
        for depth in range(1, phase.name.count("/") + 1)
    }
    return [phase for phase in phases if (phase.process, phase.name) not in parents]


def _rank(process: str) -> int:
    kind = process.split("-")[0]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _clip(value: float, end: float) -> float:
    return min(max(value, 0.0), end)


def median_start(cell: CellResult, kind: str) -> StartupReport | None:
    """The start of `kind` whose time to the first token is the (upper) median."""
    starts = [start for start in cell.startup if start.kind == kind and start.to_first_token_s is not None]
    starts.sort(key=lambda start: start.to_first_token_s or 0.0)
    return starts[len(starts) // 2] if starts else None


def cache_misses(start: StartupReport) -> int:
    """Phases that found nothing in the compile cache, of a server that says so."""
    return sum(phase.attributes.get("cache") == "miss" for phase in start.phases)
