"""What reports say, before any markup: groups of comparable cells, their variants, and what each choice buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from reports.directory import ResultSet
from reports.metrics import Metric, pick
from reports.schema import CellConfig, CellResult, Status

PROBLEMS: tuple[Status, ...] = ("failed", "timeout", "invalid", "interrupted")
MEASURED: tuple[Status, ...] = ("ok", "invalid", "interrupted")

COMPARED = pick("output_tokens_per_s", "ttft_p50_s", "tpot_p50_s", "to_healthy_cold_s", "to_healthy_warm_s")


@dataclass(frozen=True, slots=True)
class Variant:
    """How a model is served: what the cells of a group differ in."""

    engine: str
    mode: str | None
    backend: str | None

    @classmethod
    def of(cls, config: CellConfig) -> Variant:
        return cls(config.engine, config.mode, config.attention_backend)


@dataclass(slots=True)
class Group:
    """Cells that replay the same traffic against the same model."""

    model: str
    load: str
    arrival: str
    cells: list[CellResult] = field(default_factory=list)

    @property
    def title(self) -> str:
        return " · ".join(part for part in (self.load, self.arrival) if part)

    @property
    def measured(self) -> list[CellResult]:
        return [cell for cell in self.cells if cell.status in MEASURED and cell.metrics is not None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two cells that differ in one choice."""

    group: Group
    choice: str
    """"mode", "attention backend" or "engine"."""
    base: CellResult
    other: CellResult

    def ratio(self, metric: Metric) -> float | None:
        """Other over base; None where either is unknown or the base is 0."""
        base, other = metric.read(self.base), metric.read(self.other)
        return None if base is None or other is None or base == 0 else other / base


class View:
    """A result set, arranged."""

    def __init__(self, results: ResultSet) -> None:
        self.source = results
        self.cells = results.results
        self.variants = list(dict.fromkeys(Variant.of(cell.config) for cell in self.cells))
        self.groups = _groups(self.cells)
        self._engines = {variant.engine for variant in self.variants}

    def variant_label(self, config: CellConfig) -> str:
        """`compile · TRITON_ATTN`; the engine is named where the matrix has several."""
        parts = [config.engine] if len(self._engines) > 1 or not config.mode else []
        return " · ".join([*parts, *(part for part in (config.mode, config.attention_backend) if part)])

    def with_status(self, *statuses: Status) -> list[CellResult]:
        return [cell for cell in self.cells if cell.status in statuses]

    @property
    def problems(self) -> list[CellResult]:
        return self.with_status(*PROBLEMS)

    @property
    def with_failures(self) -> list[CellResult]:
        """Cells that count as measured although some of their requests failed."""
        return [cell for cell in self.with_status("ok") if cell.metrics is not None and cell.metrics.failed]

    @property
    def servers(self) -> list[CellResult]:
        """One cell of every distinct server that has start-up reports."""
        chosen: dict[tuple[str, Variant, bytes], CellResult] = {}
        for cell in self.cells:
            if cell.startup:
                arguments = msgspec.json.encode(cell.config.server_args, order="deterministic")
                chosen.setdefault((cell.config.model, Variant.of(cell.config), arguments), cell)
        return list(chosen.values())

    def status_counts(self) -> dict[Status, int]:
        counts: dict[Status, int] = {}
        for cell in self.cells:
            counts[cell.status] = counts.get(cell.status, 0) + 1
        return counts

    def comparisons(self) -> list[Comparison]:
        """Every pair of measured cells of a group that differ in exactly one of mode, backend and engine.

        The earlier of the two is the base, except that `compile` is always compared with `eager`.
        """
        found: list[Comparison] = []
        for group in self.groups:
            cells = [cell for cell in group.measured if cell.status == "ok"]
            for position, first in enumerate(cells):
                for second in cells[position + 1 :]:
                    choice = _single_difference(Variant.of(first.config), Variant.of(second.config))
                    if choice is None:
                        continue
                    base, other = first, second
                    if choice == "mode" and first.config.mode == "compile":
                        base, other = second, first
                    found.append(Comparison(group, choice, base, other))
        return sorted(found, key=lambda comparison: ("mode", "attention backend", "engine").index(comparison.choice))


def load_and_arrival(result: CellResult) -> tuple[str, str]:
    """The last two parts of a matrix cell's id; for another id the workload's name and nothing."""
    config = result.config
    server = "/".join(part for part in (config.engine, config.model, config.mode, config.attention_backend) if part)
    rest = result.cell_id.removeprefix(server + "/")
    load, slash, arrival = rest.rpartition("/")
    if rest == result.cell_id or not slash:
        return str(config.workload.get("name", result.cell_id)), str(config.arrival.get("name", ""))
    return load, arrival


def _groups(cells: Sequence[CellResult]) -> list[Group]:
    groups: dict[tuple[str, bytes], Group] = {}
    for cell in cells:
        config = cell.config
        traffic = (config.workload, config.arrival, config.endpoint, config.seed)
        key = (config.model, msgspec.json.encode(traffic, order="deterministic"))
        load, arrival = load_and_arrival(cell)
        groups.setdefault(key, Group(config.model, load, arrival)).cells.append(cell)
    return list(groups.values())


def _single_difference(first: Variant, second: Variant) -> str | None:
    differences = [
        choice
        for choice, a, b in (
            ("mode", first.mode, second.mode),
            ("attention backend", first.backend, second.backend),
            ("engine", first.engine, second.engine),
        )
        if a != b
    ]
    return differences[0] if len(differences) == 1 else None
