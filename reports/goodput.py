"""Goodput beside the figures: how much of each cell's traffic met each SLO that was stated."""

from __future__ import annotations

from dataclasses import dataclass

from reports import formatting
from reports.schema import Goodput
from reports.view import View

GOODPUT_NOTE = (
    "Completed requests per second that meet every limit of an SLO, and their share of all requests sent; "
    "a value that is not known meets none."
)


@dataclass(frozen=True, slots=True)
class GoodputRow:
    """One SLO of one cell as tables show it; texts are ready to print, a dash where nothing is known."""

    variant: str
    """How the model was served."""
    traffic: str
    """Load and arrival; with the model where the report has several."""
    slo: str
    requests_per_s: str
    share: str
    requests: str
    """`388 of 400`"""


def goodput_rows(view: View) -> list[GoodputRow]:
    """A row for each measured cell and each of its SLOs, in order; none where no SLO was stated."""
    several = len(view.models) > 1
    rows: list[GoodputRow] = []
    for group in view.groups:
        traffic = f"{group.model} · {group.title}" if several else group.title
        for cell in group.measured:
            assert cell.metrics is not None
            rows += [
                GoodputRow(
                    view.variant_label(cell.config),
                    traffic,
                    goodput.slo,
                    formatting.significant(goodput.requests_per_s),
                    formatting.share(goodput.share),
                    f"{formatting.count(goodput.met)} of {formatting.count(goodput.total)}",
                )
                for goodput in cell.metrics.goodput
            ]
    return rows


def within(goodput: Goodput) -> str:
    """`97.2% within ttft:200ms tpot:20ms`"""
    return f"{formatting.share(goodput.share)} within {goodput.slo}"
