"""What a load's status is, and why: what ended it first, then whether its figures can be trusted."""

from __future__ import annotations

from typing import Any

from benchctl.loadgen.options import LoadOutcome
from reports.schema import LoadMetrics, Status

_FULL_DURATION = 0.9
"""Of its duration, what a load whose arrivals are random may end before without a word."""


def verdict(
    outcome: LoadOutcome | None,
    failure: str | None,
    exit_code: int | None,
    *,
    interrupted: bool,
    late_s: float | None = None,
) -> tuple[Status, str | None]:
    """Status and reason of a load.

    `failure`: why there is no outcome. `exit_code`: of the server, None while it runs. `late_s`: the time limit that
    ended the load, if one did.
    """
    if interrupted:
        return "interrupted", f"interrupted; the figures cover what had run until then{_left(outcome)}"
    if exit_code is not None:
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with status {exit_code}"
        return "failed", f"the server {how} during the run"
    if late_s is not None:
        return "timeout", f"the cell did not end within {late_s:g} s{_left(outcome)}"
    if outcome is None:
        return "failed", failure
    metrics = outcome.metrics
    failures = f"; {explain_failures(metrics, outcome.error_details)}" if metrics.errors else ""
    if outcome.aborted is not None:
        return "failed", f"{outcome.aborted}{failures}"
    if metrics.completed == 0:
        return "failed", f"no request was completed: {explain_failures(metrics, outcome.error_details)}"
    if metrics.throughput.output_tokens == 0:
        return "failed", f"{metrics.completed} answers and not one token in any: the server generates nothing{failures}"
    if metrics.client_saturated:
        lag = metrics.client_lag_s.percentiles.get("p99") or 0.0
        return "invalid", (
            f"client saturated: client lag p99 {lag * 1e3:.1f} ms is above {metrics.client_lag_bound_s * 1e3:.1f} ms; "
            "lower the rate, raise the client's workers or use a machine with more cores"
        )
    return "ok", explain_failures(metrics, outcome.error_details) if metrics.failed else None


def ran_out(arrival: dict[str, Any], requests: int, metrics: LoadMetrics) -> str | None:
    """Says that a load ended well before its duration because it had no more requests; None when it did not."""
    duration_s, window = arrival.get("duration_s"), metrics.throughput
    used = metrics.completed + metrics.failed + metrics.excluded_warmup + metrics.excluded_cooldown
    if not isinstance(duration_s, int | float) or window.window_s is None or used < requests:
        return None
    ended_s = (window.window_start_s or 0.0) + window.window_s
    if ended_s >= _FULL_DURATION * duration_s:
        return None
    return (
        f"all {requests} requests were answered after {ended_s:.3g} of {duration_s:g} s; give more (num_requests) to "
        "load the server for as long as that"
    )


def explain_failures(metrics: LoadMetrics, details: dict[str, str]) -> str:
    """`3 × http 503 (overloaded), 1 × timeout`; what was said comes from the server or the system."""
    if not metrics.errors:
        return "none was sent"
    return ", ".join(
        f"{number} × {cause}" + (f" ({details[cause]})" if details.get(cause) else "")
        for cause, number in metrics.errors.items()
    )


def _left(outcome: LoadOutcome | None) -> str:
    """What a load that was ended early had begun."""
    if outcome is None or not (outcome.metrics.interrupted or outcome.metrics.unsent):
        return ""
    return f" ({outcome.metrics.interrupted} in flight, {outcome.metrics.unsent} due and still waiting to be sent)"
