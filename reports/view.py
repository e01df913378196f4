"""What reports say, before any markup: groups of comparable cells, their variants, and what each choice buys."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from reports.directory import ResultSet
from reports.metrics import METRICS, Metric, pick
from reports.schema import CellConfig, CellResult, Status

PROBLEMS: tuple[Status, ...] = ("failed", "timeout", "invalid", "interrupted")
MEASURED: tuple[Status, ...] = ("ok", "invalid", "interrupted")

_STARTS = ("to_healthy_cold_s", "to_healthy_warm_s")
COMPARED = pick("output_tokens_per_s", "ttft_p50_s", "tpot_p50_s", *_STARTS)


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
    def throughput(self) -> Metric:
        """Output tokens per second; all tokens where every answer is one token long and the prompt is the work."""
        infos = [cell.workload for cell in self.cells]
        prefill = all(info is not None and info.output_tokens_requested == info.requests for info in infos)
        return METRICS["total_tokens_per_s" if prefill else "output_tokens_per_s"]

    @property
    def measured(self) -> list[CellResult]:
        return [cell for cell in self.cells if cell.status in MEASURED and cell.metrics is not None]


@dataclass(slots=True)
class Panel:
    """Groups of one model and load that differ in their arrivals (rates, concurrencies)."""

    id: str
    model: str
    load: str
    groups: list[Group]
    show_model: bool

    @property
    def title(self) -> str:
        arrival = self.groups[0].arrival if len(self.groups) == 1 else ""
        return " · ".join(part for part in (self.model if self.show_model else "", self.load, arrival) if part)

    @property
    def measured(self) -> list[CellResult]:
        return [cell for group in self.groups for cell in group.measured]

    def arrival_of(self, cell: CellResult) -> str:
        return next(group.arrival for group in self.groups if any(cell is member for member in group.cells))


@dataclass(slots=True)
class ResultTable:
    """Measured cells side by side, each with the label of its row."""

    title: str
    """Without the model."""
    model: str
    throughput: Metric
    rows: list[tuple[str, CellResult]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two cells that differ in one choice."""

    group: Group
    choice: str
    """"mode", "attention backend" or "engine"."""
    base: CellResult
    other: CellResult

    @property
    def label(self) -> str:
        """`compile vs eager · TORCH_SDPA`: what differs, then what both have."""
        chosen = [_chosen(cell.config, self.choice) for cell in (self.other, self.base)]
        config = self.base.config
        shared = {"engine": None, "mode": config.mode, "attention backend": config.attention_backend}
        shared.pop(self.choice)
        return " · ".join([" vs ".join(chosen), *(part for part in shared.values() if part)])

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
    def number_of_cells(self) -> str:
        return f"{len(self.cells)} cell{'' if len(self.cells) == 1 else 's'}"

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(cell.config.model for cell in self.cells))

    @property
    def panels(self) -> list[Panel]:
        """Groups by model and load, in order."""
        panels: dict[tuple[str, str], Panel] = {}
        for group in self.groups:
            key = (group.model, group.load)
            if key not in panels:
                panels[key] = Panel(f"panel-{len(panels)}", group.model, group.load, [], len(self.models) > 1)
            panels[key].groups.append(group)
        return list(panels.values())

    @property
    def tables(self) -> list[ResultTable]:
        """A table per group; one for all groups of a panel that have the same single variant, as in a sweep."""
        tables: list[ResultTable] = []
        for panel in self.panels:
            groups = [group for group in panel.groups if group.measured]
            single = {self.variant_label(cell.config) for cell in panel.measured}
            metrics = {group.throughput.key for group in groups}
            if len(groups) > 1 and len(single) == len(metrics) == 1 and all(len(g.measured) == 1 for g in groups):
                rows = [(group.arrival, group.measured[0]) for group in groups]
                title = " · ".join(part for part in (panel.load, *single) if part)
                tables.append(ResultTable(title, panel.model, groups[0].throughput, rows))
                continue
            for group in groups:
                rows = [(self.variant_label(cell.config), cell) for cell in group.measured]
                tables.append(ResultTable(group.title, group.model, group.throughput, rows))
        return tables

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
        """Number of cells by status, problems first; a status that no cell has is left out."""
        order: tuple[Status, ...] = (*PROBLEMS, "ok", "unsupported")
        return {status: number for status in order if (number := len(self.with_status(status)))}

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


@dataclass(frozen=True, slots=True)
class Choice:
    """What one choice buys over all its pairs: geometric means of ratios, medians of start-up differences."""

    other: str
    base: str
    pairs: int
    ratios: dict[str, float]
    """Metric key -> other over base."""
    seconds: dict[str, float]
    """Start-up metric key -> other minus base, seconds."""


def summarise(view: View) -> list[Choice]:
    """One `Choice` per pair of modes, of backends and of engines."""
    pairs: dict[tuple[str, str, str], list[Comparison]] = {}
    for comparison in view.comparisons():
        other, base = (_chosen(cell.config, comparison.choice) for cell in (comparison.other, comparison.base))
        pairs.setdefault((comparison.choice, other, base), []).append(comparison)
    choices = []
    for (_, other, base), comparisons in pairs.items():
        ratios, seconds = {}, {}
        for metric in COMPARED:
            if metric.key in _STARTS:
                known = [(metric.read(c.other), metric.read(c.base)) for c in comparisons]
                differences = [a - b for a, b in known if a is not None and b is not None]
                if differences:
                    seconds[metric.key] = statistics.median(differences)
            else:
                values = [value for c in comparisons if (value := c.ratio(metric)) is not None and value > 0]
                if values:
                    ratios[metric.key] = statistics.geometric_mean(values)
        choices.append(Choice(other, base, len(comparisons), ratios, seconds))
    return choices


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


def _chosen(config: CellConfig, choice: str) -> str:
    chosen = {"mode": config.mode, "attention backend": config.attention_backend, "engine": config.engine}[choice]
    return chosen or "default"


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


def known_columns(metrics: Sequence[Metric], cells: Sequence[CellResult]) -> list[Metric]:
    """Those of `metrics` that at least one cell has."""
    return [metric for metric in metrics if any(metric.read(cell) is not None for cell in cells)]
