"""From runs to log ratios: which cell and metric, which pairs, and whether percentiles have samples enough."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchctl.gate.runs import Run
from benchctl.gate.settings import GateSettings, log_effect
from reports.metrics import METRICS, Metric
from reports.schema import CellConfig, CellResult

_PERCENTILE_KEY = re.compile(r"(?P<name>.+)_p(?P<percent>\d+)_s")
MIN_SAMPLES = 5


@dataclass(slots=True)
class Comparison:
    """One gated metric of one cell (or, for starts, of one server) over all pairs of runs."""

    cell_id: str
    metric: Metric
    min_effect: float
    baseline: list[float | None] = field(default_factory=list)
    candidate: list[float | None] = field(default_factory=list)
    missing: str | None = None
    """Why it cannot be judged."""

    @property
    def name(self) -> str:
        return f"{self.cell_id} {self.metric.label}"

    @property
    def log_min_effect(self) -> float:
        return log_effect(self.metric, self.min_effect)

    @property
    def log_ratios(self) -> list[float]:
        """Positive where the candidate is worse; pairs with an unknown or non-positive value are left out."""
        return [
            ratio
            for base, new in zip(self.baseline, self.candidate, strict=True)
            if (ratio := log_ratio(self.metric, base, new)) is not None
        ]


def log_ratio(metric: Metric, baseline: float | None, candidate: float | None) -> float | None:
    """log(candidate / baseline), its sign turned for metrics where more is better; None where there is no ratio."""
    if not baseline or not candidate or baseline < 0 or candidate < 0:
        return None
    ratio = math.log(candidate / baseline)
    return -ratio if metric.higher_is_better else ratio


def is_startup(metric: Metric) -> bool:
    return metric.key.startswith("to_")


def server_name(config: CellConfig) -> str:
    """The server that a cell ran against; all its cells share their start-up figures."""
    return "/".join(part for part in (config.engine, config.model, config.mode, config.attention_backend) if part)


def gated_comparisons(pairs: Sequence[tuple[Run, Run]], settings: GateSettings) -> list[Comparison]:
    """Everything that the settings gate, with its values; cells that no run could run are left out.

    Metrics from the defaults that were never measured, or whose percentile has too few samples, are left out; those
    that the suite names itself are kept with the reason in `missing`.
    """
    chosen = settings.min_effect is not None
    found: list[Comparison] = []
    seen_servers: set[tuple[str, str]] = set()
    for cell_id in cell_ids(run for pair in pairs for run in pair):
        results = [run.cells[cell_id] for pair in pairs for run in pair if cell_id in run.cells]
        if all(result.status == "unsupported" for result in results):
            continue
        for key, effect in settings.effects.items():
            metric = METRICS[key]
            name = cell_id
            if is_startup(metric):
                name = server_name(results[0].config)
                if (name, key) in seen_servers:
                    continue
                seen_servers.add((name, key))
            comparison = Comparison(name, metric, effect)
            comparison.baseline = [_value(metric, base, cell_id) for base, _ in pairs]
            comparison.candidate = [_value(metric, new, cell_id) for _, new in pairs]
            few = too_few_samples(metric, results)
            comparison.missing = _why_missing(comparison) or few
            never = all(value is None for value in comparison.baseline + comparison.candidate)
            if chosen or not (never or few):
                found.append(comparison)
    return found


def cell_ids(runs: Iterable[Run]) -> list[str]:
    """Ids of all cells in the order of their first run."""
    return list(dict.fromkeys(cell_id for run in runs for cell_id in run.cells))


def too_few_samples(metric: Metric, results: Iterable[CellResult]) -> str | None:
    """Why a percentile cannot be read off these results: it needs a sample beyond it, and `MIN_SAMPLES` at least."""
    match = _PERCENTILE_KEY.fullmatch(metric.key)
    if match is None:
        return None
    percent = int(match["percent"])
    need = max(MIN_SAMPLES, math.ceil(100 / (100 - percent)))
    counts = [getattr(result.metrics, f"{match['name']}_s").n for result in results if result.metrics is not None]
    fewest = min(counts, default=0)
    return None if fewest >= need else f"{fewest} samples are too few for a p{percent}, which needs {need}"


def _value(metric: Metric, run: Run, cell_id: str) -> float | None:
    result = run.cells.get(cell_id)
    return None if result is None else metric.read(result)


def _why_missing(comparison: Comparison) -> str | None:
    if len(comparison.log_ratios) == len(comparison.baseline):
        return None
    for side, values in (("baseline", comparison.baseline), ("candidate", comparison.candidate)):
        if all(value is None for value in values):
            return f"not measured in the {side}"
    if None in comparison.baseline + comparison.candidate:
        return "not measured in every run"
    return "is zero in some run, so that there is no ratio"
