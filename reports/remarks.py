"""What a reader must know of measured figures beside the figures: what was approximated, repeated or left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from reports.schema import CellResult

_NAMED = 3
"""Cells that a remark names; of more it says the number."""


@dataclass(frozen=True, slots=True)
class Remark:
    """One remark and the cells that it is about."""

    text: str
    cells: list[str]

    @property
    def where(self) -> str:
        return ", ".join(self.cells) if len(self.cells) <= _NAMED else f"{len(self.cells)} cells"


def remarks(cells: Iterable[CellResult]) -> list[Remark]:
    """Every remark once, in the order of the first cell that has it."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        for text in _of(cell):
            found.setdefault(text, []).append(cell.cell_id)
    return [Remark(text, ids) for text, ids in found.items()]


def _of(cell: CellResult) -> Iterator[str]:
    metrics = cell.metrics
    if metrics is None:
        return
    if cell.status == "ok" and cell.reason and not metrics.failed:
        yield cell.reason
    if metrics.excluded_warmup or metrics.excluded_cooldown:
        yield (
            f"{metrics.excluded_warmup} warm-up and {metrics.excluded_cooldown} cool-down requests are left out of all "
            "figures but the steady state and the time series"
        )
    if metrics.retries:
        yield (
            f"{metrics.retries} attempts were made again; TTFT holds the wait, "
            "and failed attempts are not failed requests"
        )
    without_tpot = metrics.completed - metrics.tpot_s.n
    if without_tpot > 0 and any("tpot" in goodput.slo for goodput in metrics.goodput):
        yield f"{without_tpot} × no TPOT, as all tokens of the answer came at once: meets no SLO that names it"
    yield from _lengths(cell)
    if metrics.output_token_source != "usage":
        yield f"output tokens are not the server's count but from: {metrics.output_token_source}"
    if cell.workload is not None:
        if dropped := cell.workload.dropped:
            yield "left out of the workload: " + ", ".join(f"{number} × {why}" for why, number in dropped.items())
        yield from cell.workload.notes


def _lengths(cell: CellResult) -> Iterator[str]:
    """A server that ends answers early does less work than the one beside it."""
    metrics, sent = cell.metrics, cell.workload
    if metrics is None or sent is None or not sent.forced_lengths or not cell.config.client.get("force_lengths", True):
        return
    made = metrics.throughput.output_tokens
    if metrics.output_token_source != "usage" or made is None or metrics.completed != sent.requests:
        return
    if made != sent.output_tokens_requested:
        yield (
            f"answers hold {made:,} output tokens instead of the {sent.output_tokens_requested:,} that were forced: "
            "the server does not keep to ignore_eos"
        )
