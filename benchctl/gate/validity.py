"""Whether the runs may be judged at all. Every reason found here makes the gate inconclusive, never a pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec
import numpy as np

from benchctl.gate.comparable import require_comparable
from benchctl.gate.pairing import SIDES
from benchctl.gate.runs import Run
from benchctl.gate.samples import cell_ids
from reports.schema import CellResult, Distribution

# A GPU that works this much below the clock of the other runs was throttled or shared; clocks of like runs agree
# within a few percent (they follow temperature and load).
CLOCK_TOLERANCE = 0.08
BUSY_PERCENT = 50.0
# Without forced lengths two builds may stop a few answers a little earlier or later.
FREE_LENGTH_TOLERANCE = 0.01
MAX_REASONS = 20
BUSY_CORES = 0.5
"""Difference between runs in the cores that others used from which a person is told."""


def invalid_reasons(pairs: Sequence[tuple[Run, Run]], ignore: Collection[str] = ()) -> list[str]:
    """Why these pairs cannot be judged, one line each; at most `MAX_REASONS`, the most important first.

    Raises IncomparableError when results of one cell come from different experiments.
    """
    reasons: list[str] = []
    for cell_id in cell_ids(run for pair in pairs for run in pair):
        results = _labelled(pairs, cell_id)
        known = [(label, result) for label, result in results if result is not None]
        if all(result.status == "unsupported" for _, result in known) and len(known) == len(results):
            continue
        first = known[0][1]
        for label, result in known:
            require_comparable(first, result, ignore, where=f"{cell_id}, {label}")
        for label, one in results:
            reasons += [f"{cell_id}, {label}: {reason}" for reason in _broken(one)]
        reasons += [f"{cell_id}: {reason}" for reason in _copies(known)]
        measured = [result for _, result in known if result.metrics is not None]
        reasons += [f"{cell_id}: {reason}" for reason in (*_token_totals(measured), *_clocks(known))]
    if len(reasons) > MAX_REASONS:
        reasons[MAX_REASONS:] = [f"and {len(reasons) - MAX_REASONS} more"]
    return reasons


def broken_candidate_cells(pairs: Sequence[tuple[Run, Run]]) -> list[str]:
    """Cells that ended as failed or timeout in every candidate run and as ok in every baseline run, with a reason."""
    broken = []
    for cell_id in cell_ids(base for base, _ in pairs):
        base = [run.cells.get(cell_id) for run, _ in pairs]
        new = [run.cells.get(cell_id) for _, run in pairs]
        if all(r is not None and r.status == "ok" for r in base) and all(
            r is not None and r.status in ("failed", "timeout") for r in new
        ):
            reason = next((r.reason for r in new if r is not None and r.reason), "no reason given")
            broken.append(f"{cell_id}: fails in every candidate run: {reason}")
    return broken


def disturbances(pair: tuple[Run, Run]) -> list[str]:
    """What disturbed a pair from outside of the server: a saturated client, a throttled or shared GPU."""
    return [
        f"{cell_id}, {label}: {reason}"
        for cell_id in cell_ids(pair)
        for label, result in _labelled([pair], cell_id)
        if result is not None
        for reason in _disturbed(result)
    ]


def not_interleaved(pairs: Sequence[tuple[Run, Run]]) -> str | None:
    """A warning when all runs of one side were made before all runs of the other."""
    if len(pairs) < 2:
        return None
    spans = [[pair[side].started_at for pair in pairs] for side in (0, 1)]
    if max(spans[0]) < min(spans[1]) or max(spans[1]) < min(spans[0]):
        return "all runs of one side were made before the other's: a drift of the machine looks like a change"
    return None


def different_machines(pairs: Sequence[tuple[Run, Run]]) -> str | None:
    """A warning when the runs were not all made on one machine."""
    names = {cell.provenance.hostname_hash for pair in pairs for run in pair for cell in run.cells.values()}
    return "runs were made on different machines" if len(names - {None}) > 1 else None


def busy_elsewhere(pairs: Sequence[tuple[Run, Run]]) -> str | None:
    """A warning when the host's other work (the client's included) differed between runs by `BUSY_CORES` or more."""
    cores = [
        other
        for pair in pairs
        for run in pair
        for cell in run.cells.values()
        if (other := _other_cores(cell)) is not None
    ]
    if not cores or max(cores) - min(cores) < BUSY_CORES:
        return None
    return (
        f"the machine did other work: beside the server {min(cores):.1f} to {max(cores):.1f} cores were busy, "
        "depending on the run; a quieter machine needs fewer pairs"
    )


def _other_cores(result: CellResult) -> float | None:
    """Median over a run of the cores that were busy with something else than the server."""
    host, server = (result.telemetry.get(name, []) for name in ("host.cpu_cores_busy", "server.cpu_cores"))
    known = [a - b for a, b in zip(host, server, strict=False) if a is not None and b is not None]
    return float(np.median(known)) if known else None


def _labelled(pairs: Sequence[tuple[Run, Run]], cell_id: str) -> list[tuple[str, CellResult | None]]:
    return [
        (f"{side} {number}", run.cells.get(cell_id))
        for number, pair in enumerate(pairs, 1)
        for side, run in zip(SIDES, pair, strict=True)
    ]


def _broken(result: CellResult | None) -> Iterable[str]:
    if result is None:
        yield "no result"
        return
    yield from _disturbed(result)
    if result.status not in ("ok", "invalid"):
        yield f"{result.status}: {result.reason or 'no reason given'}"
        return
    metrics = result.metrics
    if metrics is None:
        yield "no metrics"
        return
    if metrics.failed:
        causes = ", ".join(f"{number} {cause}" for cause, number in metrics.errors.items())
        yield f"{metrics.failed} of {metrics.failed + metrics.completed} requests failed ({causes or 'cause unknown'})"


def _copies(results: Sequence[tuple[str, CellResult]]) -> Iterable[str]:
    """Results that are there twice, to the last digit: one directory on both sides, a file that nobody wrote anew."""
    seen: dict[bytes, str] = {}
    for label, result in results:
        first = seen.setdefault(msgspec.json.encode(result), label)
        if first is not label:
            yield f"{label} is a copy of {first}, not a run of its own"


def _disturbed(result: CellResult) -> Iterable[str]:
    if result.status == "invalid":
        yield f"invalid: {result.reason or 'no reason given'}"
    elif result.metrics is not None and result.metrics.client_saturated:
        yield "the client was saturated"
    series = result.telemetry
    for gpu in _gpu_names(series):
        if any(value for value in series.get(f"{gpu}.throttled", []) if value):
            yield f"{gpu} was throttled (heat or power brake)"
        others = max((value for value in series.get(f"{gpu}.processes", []) if value is not None), default=None)
        if others is not None and others > 1:
            yield f"{gpu} was shared: {others:.0f} processes computed on it"


def _token_totals(results: Sequence[CellResult]) -> Iterable[str]:
    """Different work was done: token totals differ between runs."""
    for name, read in (
        ("prompt tokens", lambda r: r.metrics.prompt_tokens),
        ("output tokens", lambda r: r.metrics.output_tokens),
    ):
        totals = [total for result in results if (total := _total(read(result))) is not None]
        if not totals:
            continue
        forced = all(result.workload is not None and result.workload.forced_lengths for result in results)
        allowed = 0.5 if forced or name == "prompt tokens" else FREE_LENGTH_TOLERANCE * max(totals)
        if max(totals) - min(totals) > allowed:
            yield f"different {name}: {min(totals):,.0f} to {max(totals):,.0f} over the runs"


def _total(distribution: Distribution) -> float | None:
    return None if distribution.mean is None else distribution.mean * distribution.n


def _clocks(results: Sequence[tuple[str, CellResult]]) -> Iterable[str]:
    """GPUs whose clock while busy differs between runs."""
    clocks: dict[str, list[tuple[float, str]]] = {}
    for label, result in results:
        for gpu in _gpu_names(result.telemetry):
            if (clock := _busy_clock(result, gpu)) is not None:
                clocks.setdefault(gpu, []).append((clock, label))
    for gpu, seen in clocks.items():
        (slow, where), (fast, _) = min(seen), max(seen)
        if slow < fast * (1 - CLOCK_TOLERANCE):
            yield f"{gpu} was slowed in {where}: {slow:.0f} MHz while busy against {fast:.0f} MHz"


def _busy_clock(result: CellResult, gpu: str) -> float | None:
    """Median SM clock over the samples at which the GPU was busy."""
    clocks, use = (result.telemetry.get(f"{gpu}.{name}", []) for name in ("sm_clock_mhz", "utilization_percent"))
    busy = [
        clock
        for clock, percent in zip(clocks, use, strict=False)
        if clock is not None and percent is not None and percent >= BUSY_PERCENT
    ]
    return float(np.median(busy)) if busy else None


def _gpu_names(series: dict[str, list[float | None]]) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in series if name.startswith("gpu")))
