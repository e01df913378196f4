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
    yield from shortfalls(cell)
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
    if metrics.output_token_source != "usage":
        yield f"output tokens are not the server's count but from: {metrics.output_token_source}"
    if cell.workload is not None:
        if dropped := cell.workload.dropped:
            yield "left out of the workload: " + ", ".join(f"{number} × {why}" for why, number in dropped.items())
        yield from cell.workload.notes


def shortfalls(cell: CellResult) -> Iterator[str]:
    """Work that was asked for and not done: a server that ends answers early does less than the one beside it."""
    metrics = cell.metrics
    if metrics is None:
        return
    if (without := metrics.completed - metrics.ttft_s.n) > 0:
        yield (
            f"{without} of {metrics.completed} completed answers came without any text or token: they have no TTFT, "
            "and meet no SLO that names it"
        )
    made, forced = metrics.throughput.output_tokens, metrics.forced_output_tokens
    if made is None or forced is None or not (metrics.shorter_answers or metrics.longer_answers):
        return
    counts = ((metrics.shorter_answers, "shorter"), (metrics.longer_answers, "longer"))
    said = " and ".join(f"{number} {what}" for number, what in counts if number)
    broken = "ignore_eos" if metrics.shorter_answers else "max_tokens"
    doubt = "" if metrics.output_token_source == "usage" else ", or counts that are not its own mislead"
    yield (
        f"answers hold {made:,} output tokens instead of the {forced:,} that were forced "
        f"({said} of {metrics.completed}): the server does not keep to {broken}{doubt}"
    )
