"""Figures measured elsewhere, beside ours."""

from __future__ import annotations

from dataclasses import dataclass

from reports import formatting
from reports.metrics import METRICS, Metric
from reports.view import View


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """One figure as tables show it; texts are ready to print, a dash where nothing is known."""

    cell_id: str
    metric: Metric
    reference: str
    ours: str
    ratio: str
    """Ours over the reference."""
    tone: str
    """"better" where ours meets the target, "worse" where it misses it, "same" without ours or a target."""
    target: str
    limit: str


def reference_rows(view: View) -> list[ReferenceRow]:
    """Rows in the order of the suite; figures of a metric that this version does not know are left out."""
    if view.source.index is None:
        return []
    by_id = {cell.cell_id: cell for cell in view.cells}
    rows = []
    for figure in view.source.index.reference:
        metric = METRICS.get(figure.metric)
        if metric is None:
            continue
        cell = by_id.get(figure.cell_id)
        ours = metric.read(cell) if cell is not None else None
        tone = "same"
        if ours is not None and figure.target is not None:
            tone = "better" if (ours >= figure.target) == metric.higher_is_better or ours == figure.target else "worse"
        rows.append(
            ReferenceRow(
                figure.cell_id,
                metric,
                metric.format(figure.value),
                metric.format(ours),
                formatting.ratio(None if ours is None or figure.value == 0 else ours / figure.value),
                tone,
                metric.format(figure.target),
                metric.format(figure.limit),
            )
        )
    return rows
