"""What differs between a baseline and other results, with the interval that the number of runs allows."""

from __future__ import annotations

import statistics as stdlib_statistics
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchctl.gate.comparable import IncomparableError, require_comparable
from benchctl.gate.runs import Run, load_runs
from benchctl.gate.samples import cell_ids, log_ratio
from benchctl.gate.settings import relative_change
from benchctl.gate.statistics import center, lower_bound, reachable_p, upper_bound
from reports.metrics import METRICS, Metric
from reports.schema import CellResult

# 95% two-sided, where there are pairs enough to reach it.
LEVEL = 0.025


class Change(msgspec.Struct, kw_only=True):
    """One metric of one other result against the baseline: candidate / baseline - 1."""

    value: float | None
    """Median over the runs, in the metric's unit."""
    change: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    """Of low to high; null with a single run on a side, which says nothing about the spread of runs."""


class Row(msgspec.Struct, kw_only=True):
    """One metric of one cell."""

    metric: str
    baseline: float | None
    others: list[Change]


class CellComparison(msgspec.Struct, kw_only=True):
    cell_id: str
    others: list[str]
    """The cell's id in each of the other results, where it is another one."""
    rows: list[Row]
    problems: list[str] = []
    """Cells that were not measured well: status and reason."""


class ComparisonTable(msgspec.Struct, kw_only=True):
    """The whole comparison."""

    labels: list[str]
    """Paths, the baseline first."""
    runs: list[int]
    """Server runs on each side."""
    cells: list[CellComparison]
    only_in: dict[str, list[str]] = {}
    """Label -> cells that have no partner."""


def compare(paths: Sequence[Path], ignore: Collection[str] = ()) -> ComparisonTable:
    """Compare results (files or directories) with the first of `paths`.

    Raises UserError for results that cannot be read, IncomparableError for those of different experiments or without
    a common cell.
    """
    sides = [load_runs(path) for path in paths]
    base_ids = cell_ids(sides[0])
    partners = [_partners(base_ids, cell_ids(side)) for side in sides[1:]]
    cells = [
        _compare_cell(cell_id, sides, [names.get(cell_id) for names in partners], ignore, paths)
        for cell_id in base_ids
        if any(cell_id in names for names in partners)
    ]
    if not cells:
        raise IncomparableError(f"{paths[0]} and {paths[1]}: have no cell in common")
    only = {str(paths[0]): [name for name in base_ids if all(name not in names for names in partners)]}
    for path, side, names in zip(paths[1:], sides[1:], partners, strict=True):
        only[str(path)] = [name for name in cell_ids(side) if name not in names.values()]
    return ComparisonTable(
        labels=[str(path) for path in paths],
        runs=[len(side) for side in sides],
        cells=cells,
        only_in={label: names for label, names in only.items() if names},
    )


def _partners(base_ids: Sequence[str], other_ids: Sequence[str]) -> dict[str, str]:
    """Baseline cell -> the other side's cell: by id; two single cells are compared whatever they are called."""
    if len(base_ids) == len(other_ids) == 1:
        return {base_ids[0]: other_ids[0]}
    return {name: name for name in base_ids if name in other_ids}


def _compare_cell(
    cell_id: str,
    sides: Sequence[Sequence[Run]],
    names: Sequence[str | None],
    ignore: Collection[str],
    paths: Sequence[Path],
) -> CellComparison:
    base = _results(sides[0], cell_id)
    others = [[] if name is None else _results(side, name) for side, name in zip(sides[1:], names, strict=True)]
    problems = []
    for path, results in zip(paths, [base, *others], strict=True):
        for result in results:
            require_comparable(base[0], result, ignore, where=f"{paths[0]} and {path}, cell {cell_id}")
            if result.status != "ok":
                problems.append(f"{path}: {result.status}: {result.reason or 'no reason given'}")
            elif result.metrics is not None and result.metrics.failed:
                problems.append(f"{path}: {result.metrics.failed} failed requests")
    rows = [_row(metric, base, others) for metric in METRICS.values()]
    known = [row for row in rows if row.baseline is not None or any(other.value is not None for other in row.others)]
    return CellComparison(
        cell_id=cell_id, others=[name or "" for name in names], rows=known, problems=list(dict.fromkeys(problems))
    )


def _results(runs: Sequence[Run], cell_id: str) -> list[CellResult]:
    return [run.cells[cell_id] for run in runs if cell_id in run.cells]


def _row(metric: Metric, base: Sequence[CellResult], others: Sequence[Sequence[CellResult]]) -> Row:
    return Row(metric=metric.key, baseline=_median(metric, base), others=[_change(metric, base, one) for one in others])


def _median(metric: Metric, results: Sequence[CellResult]) -> float | None:
    known = [value for result in results if (value := metric.read(result)) is not None]
    return stdlib_statistics.median(known) if known else None


def _change(metric: Metric, base: Sequence[CellResult], other: Sequence[CellResult]) -> Change:
    result = Change(value=_median(metric, other))
    # Runs are paired in their order; what one side has more of stays unpaired.
    pairs = [log_ratio(metric, metric.read(a), metric.read(b)) for a, b in zip(base, other, strict=False)]
    ratios = np.array([ratio for ratio in pairs if ratio is not None])
    if metric.unit == "count" or not len(ratios):
        return result
    result.change = relative_change(metric, float(center(ratios)))
    if len(ratios) > 1:
        level = max(LEVEL, reachable_p(len(ratios)))
        ends = [relative_change(metric, float(bound(ratios, level))) for bound in (lower_bound, upper_bound)]
        result.low, result.high = sorted(ends)
        result.confidence = 1 - 2 * level
    return result
