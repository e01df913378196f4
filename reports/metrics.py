"""The metrics that reports show: what each is called, its unit, which way is better, and where it is in a result."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from reports import formatting
from reports.schema import CellResult, Distribution, LoadMetrics

Unit = Literal["s", "tok/s", "req/s", "count"]


@dataclass(frozen=True, slots=True)
class Metric:
    key: str
    label: str
    unit: Unit
    higher_is_better: bool
    definition: str
    read: Callable[[CellResult], float | None]

    def text(self, result: CellResult) -> str:
        """The value with its unit, or a dash."""
        return self.format(self.read(result))

    def format(self, value: float | None) -> str:
        if value is None:
            return formatting.UNKNOWN
        if self.unit == "s":
            return formatting.seconds(value)
        if self.unit == "count":
            return formatting.count(round(value))
        return formatting.significant(value)


def percentile(distribution: Distribution | None, name: str) -> float | None:
    return None if distribution is None else distribution.percentiles.get(name)


def start_seconds(
    result: CellResult, kind: str, which: Literal["to_healthy_s", "to_first_token_s"] = "to_healthy_s"
) -> float | None:
    """Median over the cell's starts of `kind` ("cold", "warm")."""
    known = [value for start in result.startup if start.kind == kind and (value := getattr(start, which)) is not None]
    return statistics.median(known) if known else None


def _from_load(read: Callable[[LoadMetrics], float | None]) -> Callable[[CellResult], float | None]:
    return lambda result: None if result.metrics is None else read(result.metrics)


def _percentile(field: str, name: str) -> Callable[[CellResult], float | None]:
    return _from_load(lambda metrics: percentile(getattr(metrics, field), name))


def _goodput(metrics: LoadMetrics) -> float | None:
    return metrics.goodput[0].requests_per_s if metrics.goodput else None


_TTFT = "first event with generated text minus the time at which the request was scheduled"
_TPOT = "(last token event - first) / (output tokens - tokens of the first event)"
_ITL = "gap between successive token events of a request"
_E2EL = "last token event minus the time at which the request was scheduled"

METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric(
            "output_tokens_per_s",
            "Output tok/s",
            "tok/s",
            True,
            "output tokens of completed requests / (last completion - first scheduled)",
            _from_load(lambda m: m.throughput.output_tokens_per_s),
        ),
        Metric(
            "total_tokens_per_s",
            "Total tok/s",
            "tok/s",
            True,
            "prompt and output tokens of completed requests over the same time",
            _from_load(lambda m: m.throughput.total_tokens_per_s),
        ),
        Metric(
            "requests_per_s",
            "Req/s",
            "req/s",
            True,
            "completed requests over the same time",
            _from_load(lambda m: m.throughput.requests_per_s),
        ),
        Metric(
            "steady_output_tokens_per_s",
            "Steady tok/s",
            "tok/s",
            True,
            "output tokens per second in the steady-state window",
            _from_load(lambda m: m.steady_state.output_tokens_per_s if m.steady_state else None),
        ),
        Metric(
            "goodput_requests_per_s",
            "Goodput req/s",
            "req/s",
            True,
            "completed requests per second that meet every limit of the SLO (of several, the first)",
            _from_load(_goodput),
        ),
        Metric("ttft_p50_s", "TTFT p50", "s", False, _TTFT, _percentile("ttft_s", "p50")),
        Metric("ttft_p99_s", "TTFT p99", "s", False, _TTFT, _percentile("ttft_s", "p99")),
        Metric("tpot_p50_s", "TPOT p50", "s", False, _TPOT, _percentile("tpot_s", "p50")),
        Metric("tpot_p99_s", "TPOT p99", "s", False, _TPOT, _percentile("tpot_s", "p99")),
        Metric("itl_p50_s", "ITL p50", "s", False, _ITL, _percentile("itl_s", "p50")),
        Metric("itl_p99_s", "ITL p99", "s", False, _ITL, _percentile("itl_s", "p99")),
        Metric("e2el_p50_s", "E2EL p50", "s", False, _E2EL, _percentile("e2el_s", "p50")),
        Metric("e2el_p99_s", "E2EL p99", "s", False, _E2EL, _percentile("e2el_s", "p99")),
        Metric(
            "client_lag_p99_s",
            "Client lag p99",
            "s",
            False,
            "sent minus scheduled: what the load generator itself adds; above its bound the cell is invalid",
            _percentile("client_lag_s", "p99"),
        ),
        Metric("completed", "Completed", "count", True, "requests answered in full", _from_load(lambda m: m.completed)),
        Metric(
            "failed",
            "Failed",
            "count",
            False,
            "requests not answered in full, by any cause",
            _from_load(lambda m: m.failed),
        ),
        Metric(
            "to_healthy_cold_s",
            "Cold start",
            "s",
            False,
            "exec to the first 200 of /health with empty compile caches",
            lambda result: start_seconds(result, "cold"),
        ),
        Metric(
            "to_healthy_warm_s",
            "Warm start",
            "s",
            False,
            "exec to the first 200 of /health with the caches that the cold start filled",
            lambda result: start_seconds(result, "warm"),
        ),
        Metric(
            "to_first_token_cold_s",
            "Cold start to first token",
            "s",
            False,
            "exec to the first token with empty compile caches",
            lambda result: start_seconds(result, "cold", "to_first_token_s"),
        ),
        Metric(
            "to_first_token_warm_s",
            "Warm start to first token",
            "s",
            False,
            "exec to the first token with filled caches",
            lambda result: start_seconds(result, "warm", "to_first_token_s"),
        ),
    )
}
"""By key, in the order in which tables show them."""


def pick(*keys: str) -> list[Metric]:
    return [METRICS[key] for key in keys]
