"""Made-up runs: results as a matrix writes them, with a chosen speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchctl.gate.runs import Run
from reports.results import write_result
from reports.schema import CellResult, Distribution, LoadMetrics
from tests.unit.reports import samples

Change = Callable[[CellResult], None]

_BASE = samples.cell("eager", "TORCH_SDPA", 2.0)
assert _BASE.metrics is not None
_BASE.metrics.throughput.prompt_tokens = 88_000
# The samples' GPU would make telemetry checks look at clocks that they do not have.
_BASE.telemetry = {}


def result(slowness: float = 1.0, *, started: int = 0, change: Change | None = None) -> CellResult:
    """A cell whose times are `slowness` times the sample's and whose throughput is the inverse."""
    copy = msgspec.json.decode(msgspec.json.encode(_BASE), type=CellResult)
    metrics = copy.metrics
    assert metrics is not None
    for name in ("ttft_s", "tpot_s", "e2el_s", "itl_s"):
        _scale(getattr(metrics, name), slowness)
    for name in ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s"):
        setattr(metrics.throughput, name, getattr(metrics.throughput, name) / slowness)
    for start in copy.startup:
        assert start.to_healthy_s is not None
        start.to_healthy_s *= slowness
    copy.provenance.started_at = f"2026-03-14T{started // 3600:02d}:{started // 60 % 60:02d}:{started % 60:02d}+00:00"
    if change is not None:
        change(copy)
    return copy


def run(slowness: float = 1.0, *, started: int = 0, change: Change | None = None) -> Run:
    cell = result(slowness, started=started, change=change)
    return Run(Path("made-up"), {cell.cell_id: cell})


def pairs(
    count: int, effect: float = 1.0, *, noise: float = 0.004, seed: int = 0, change: Change | None = None
) -> list[tuple[Run, Run]]:
    """Interleaved pairs; the candidate is `effect` times as slow. `change` is applied to the candidate's results."""
    jitter = np.exp(np.random.default_rng(seed).normal(0, noise, (count, 2)))
    return [
        (run(float(a), started=2 * i), run(float(b) * effect, started=2 * i + 1, change=change))
        for i, (a, b) in enumerate(jitter)
    ]


def write_runs(folder: Path, slownesses: Sequence[float], *, change: Change | None = None, started: int = 0) -> Path:
    """A directory with a run in each subdirectory."""
    for number, slowness in enumerate(slownesses):
        path = folder / f"{number:02d}"
        path.mkdir(parents=True)
        write_result(result(slowness, started=started + 2 * number, change=change), path)
    return folder


FAKE_RUN = """
import json, os, random, sys
template, output, slowness = json.load(open(sys.argv[1])), sys.argv[2], float(sys.argv[3])
slowness *= random.Random(output).gauss(1, 0.003)
if len(sys.argv) > 4:
    template["provenance"]["git_commit"] = sys.argv[4]
metrics = template["metrics"]
for name in ("ttft_s", "tpot_s"):
    values = metrics[name]["percentiles"]
    metrics[name]["percentiles"] = {key: value * slowness for key, value in values.items()}
metrics["throughput"]["output_tokens_per_s"] /= slowness
os.makedirs(output)
json.dump(template, open(os.path.join(output, "cell.json"), "w"))
"""
"""A script without imports from here, so that a run takes milliseconds: TEMPLATE OUTPUT SLOWNESS [COMMIT]."""


def write_fake_run(folder: Path, *, change: Change | None = None) -> tuple[Path, Path]:
    """(script, template) for a command that stands in for a matrix."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fake_run.py").write_text(FAKE_RUN)
    return folder / "fake_run.py", write_result(result(change=change), folder / "template.json")


def load(metrics: LoadMetrics | None) -> LoadMetrics:
    assert metrics is not None
    return metrics


def _scale(distribution: Distribution, factor: float) -> None:
    distribution.percentiles = {k: None if v is None else v * factor for k, v in distribution.percentiles.items()}
