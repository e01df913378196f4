"""The gate's answer as a document: written as JSON, read by every other output."""

from __future__ import annotations

from typing import Literal

import msgspec

from reports.schema import Provenance

VERDICT_SCHEMA_VERSION = "1.0"

Outcome = Literal["regression", "ok", "improved", "undecided", "invalid"]
"""regression: the interval's nearer bound is beyond the minimum effect. ok: the estimate is below the minimum effect
and twice that is ruled out. improved: ok, and the whole interval is on the better side. undecided: neither shown.
invalid: could not be judged; see `reason`."""

Verdict = Literal["pass", "regression", "failed", "inconclusive"]
EXIT_CODES: dict[Verdict, int] = {"pass": 0, "regression": 1, "failed": 1, "inconclusive": 3}


class MetricVerdict(msgspec.Struct, kw_only=True):
    """One gated metric of one cell. Changes are relative: candidate / baseline - 1 in the metric's own direction."""

    cell_id: str
    """A cell, or for start-up metrics the server that several cells share."""
    metric: str
    label: str
    unit: str
    higher_is_better: bool
    min_effect: float
    outcome: Outcome
    pairs: int
    baseline: float | None = None
    """Median over the baseline's runs, in `unit`."""
    candidate: float | None = None
    change: float | None = None
    change_low: float | None = None
    """Lower end of the interval; null: these pairs cannot bound it at this confidence."""
    change_high: float | None = None
    confidence: float | None = None
    """Of the interval: 1 - 2 x the level at which this metric was tested."""
    p: float | None = None
    """One-sided, against "not slower than the minimum effect"."""
    level: float | None = None
    """What p had to reach (Holm over the gated metrics, at this look's share of alpha)."""
    p_reachable: float | None = None
    """The smallest p that so many pairs can give."""
    method: Literal["sign-flip permutation", "studentised bootstrap of the median"] | None = None
    reason: str | None = None
    baseline_runs: list[float | None] = []
    candidate_runs: list[float | None] = []


class SideInfo(msgspec.Struct, kw_only=True):
    """What was on one side of the comparison."""

    label: str
    """A path, a revision or a command."""
    git_commit: str | None = None
    git_dirty: bool | None = None


class GateVerdict(msgspec.Struct, kw_only=True):
    """The whole answer."""

    schema_version: str = VERDICT_SCHEMA_VERSION
    verdict: Verdict
    exit_code: int
    summary: str
    """One line."""
    reasons: list[str] = []
    """Why the verdict is not a pass."""
    warnings: list[str] = []
    baseline: SideInfo
    candidate: SideInfo
    pairs: int
    max_pairs: int
    ended_early: bool = False
    order: list[str] = []
    """First letters of the sides in the order of the runs, a pair each, e.g. ["bc", "cb"]; empty for given results."""
    order_seed: int | None = None
    alpha: float
    beta: float
    look_alpha: float
    """Share of `alpha` that the last look had for all metrics."""
    look_beta: float
    metrics: list[MetricVerdict]
    provenance: Provenance | None = None
    suite: str | None = None
    duration_s: float | None = None


def verdict_json(verdict: GateVerdict) -> str:
    """Indented JSON text."""
    return msgspec.json.format(msgspec.json.encode(verdict), indent=2).decode() + "\n"
