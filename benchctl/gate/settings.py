"""The `[gate]` table of a suite: what is gated, how small an effect counts, how much error and how many pairs."""

from __future__ import annotations

import math

import msgspec

from reports.metrics import METRICS, Metric
from server.errors import UserError
from workloads.parameters import near_matches

DEFAULT_MIN_EFFECT: dict[str, float] = {
    "output_tokens_per_s": 0.03,
    "ttft_p50_s": 0.05,
    "tpot_p50_s": 0.05,
    "ttft_p99_s": 0.10,
    "tpot_p99_s": 0.10,
    "to_healthy_cold_s": 0.10,
    "to_healthy_warm_s": 0.10,
}
"""Metric -> smallest slowdown that counts, as a share of the baseline."""

MAX_PAIRS_BOUND = 64
_GATEABLE = [key for key in METRICS if key not in ("completed", "failed", "client_lag_p99_s")]


class GateSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How the gate decides; everything may stand in a suite file under `[gate]`."""

    alpha: float = 0.05
    """Probability of any false alarm in a whole gate run, over all metrics and looks: at most this."""
    beta: float = 0.10
    """Probability of a pass although a metric is slower by twice its minimum effect: at most this."""
    min_pairs: int = 4
    max_pairs: int = 12
    max_disturbed: int = 2
    """Pairs that are run again because the client was saturated or a GPU throttled or shared; more: inconclusive."""
    min_effect: dict[str, float] | None = None
    """Metric -> smallest slowdown that counts (0.03: 3%). When given, exactly these metrics are gated; None: the
    defaults, without those percentiles for which a cell has too few samples."""

    @property
    def effects(self) -> dict[str, float]:
        return DEFAULT_MIN_EFFECT if self.min_effect is None else self.min_effect


def check_settings(settings: GateSettings, where: str) -> None:
    """Raise UserError for settings that cannot be met; `where` is the file or flag that they came from."""
    for name in ("alpha", "beta"):
        if not 0 < getattr(settings, name) < 0.5:
            raise UserError(f"{where}: gate.{name} must be between 0 and 0.5, not {getattr(settings, name)}")
    if not 1 <= settings.min_pairs <= settings.max_pairs <= MAX_PAIRS_BOUND:
        raise UserError(
            f"{where}: gate needs 1 <= min_pairs <= max_pairs <= {MAX_PAIRS_BOUND}, "
            f"not min_pairs = {settings.min_pairs} and max_pairs = {settings.max_pairs}"
        )
    if settings.max_disturbed < 0:
        raise UserError(f"{where}: gate.max_disturbed must be 0 or more, not {settings.max_disturbed}")
    if not settings.effects:
        raise UserError(f"{where}: gate.min_effect is empty; nothing would be gated")
    for key, effect in settings.effects.items():
        if key not in _GATEABLE:
            raise UserError(f"{where}: gate.min_effect: metric {key!r} is unknown; {near_matches(key, _GATEABLE)}")
        if not 0 < effect < 1:
            raise UserError(f"{where}: gate.min_effect.{key} must be between 0 and 1 (0.05 is 5%), not {effect}")


def log_effect(metric: Metric, effect: float) -> float:
    """The minimum effect as a positive log ratio: throughput falls to 1 - effect, times grow to 1 + effect."""
    return -math.log1p(-effect) if metric.higher_is_better else math.log1p(effect)


def relative_change(metric: Metric, log_ratio: float) -> float:
    """The metric's own relative change (candidate / baseline - 1) for a log ratio that is positive when worse."""
    return math.expm1(-log_ratio if metric.higher_is_better else log_ratio)
