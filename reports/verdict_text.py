"""Words for a gate's verdict that every output shares."""

from __future__ import annotations

from reports import formatting
from reports.metrics import METRICS
from reports.verdict import MetricVerdict

MARKS = {"pass": "✅ pass", "regression": "❌ regression", "failed": "❌ failed", "inconclusive": "⚠️ inconclusive"}


def value_text(one: MetricVerdict, value: float | None) -> str:
    """A value with its unit, as tables show it."""
    return METRICS[one.metric].format(value) if one.metric in METRICS else formatting.significant(value)


def percent(change: float | None) -> str:
    """`+4.2%`, `−12%`; a dash for what is not known."""
    return formatting.UNKNOWN if change is None else formatting.change(1 + change)


def interval_text(one: MetricVerdict) -> str:
    """`+1.2% to +4.5%`."""
    if one.change_low is None or one.change_high is None:
        return formatting.UNKNOWN
    return f"{percent(one.change_low)} to {percent(one.change_high)}"


def limit_text(one: MetricVerdict) -> str:
    """The minimum effect in the direction that is worse: `−3%` for throughput, `+5%` for times."""
    return percent(-one.min_effect if one.higher_is_better else one.min_effect)


def explain(one: MetricVerdict) -> str:
    """One sentence about one metric."""
    if one.outcome == "invalid":
        return f"{one.label}: {one.reason or 'not judged'}"
    what = f"{one.label} {percent(one.change)} ({interval_text(one)})"
    values = f"{value_text(one, one.baseline)} → {value_text(one, one.candidate)}"
    said = {
        "regression": f"is beyond its minimum effect of {limit_text(one)}",
        "ok": f"is within its minimum effect of {limit_text(one)}",
        "improved": "is better",
        "undecided": f"decides neither for nor against its minimum effect of {limit_text(one)}",
    }[one.outcome]
    return f"{what} {said}; {values}, {one.pairs} pairs"
