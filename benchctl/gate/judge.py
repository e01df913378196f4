"""From pairs of runs to a verdict: validity first, then the statistics, then what both say together."""

from __future__ import annotations

import statistics as stdlib_statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchctl.gate.runs import Run
from benchctl.gate.samples import Comparison, gated_comparisons
from benchctl.gate.sequential import PASS_MULTIPLE, Decision, Look, decide, plan_looks
from benchctl.gate.settings import GateSettings, relative_change
from benchctl.gate.statistics import EXACT_BELOW, center, lower_bound, reachable_p, upper_bound
from benchctl.gate.validity import (
    broken_candidate_cells,
    busy_elsewhere,
    different_machines,
    invalid_reasons,
    not_interleaved,
)
from reports.verdict import EXIT_CODES, GateVerdict, MetricVerdict, Outcome, SideInfo, Verdict

# What an interval is shown at when its look spends nothing on regressions, so that it has no level of its own.
SHOWN_LEVEL = 0.05


@dataclass(slots=True)
class Judgement:
    """What the pairs so far say."""

    verdict: Verdict | None
    """None: undecided, more pairs may help."""
    reasons: list[str]
    metrics: list[MetricVerdict] = field(default_factory=list)
    look: Look | None = None


def judge(
    pairs: Sequence[tuple[Run, Run]],
    settings: GateSettings,
    *,
    looks: Sequence[Look] | None = None,
    ignore: Collection[str] = (),
) -> Judgement:
    """Judge the pairs at one look.

    `looks` is the sequential plan; the last of its looks with as many pairs as there are (or fewer) is taken, and
    None means a single look at everything. Raises IncomparableError for results of different experiments.
    """
    if broken := broken_candidate_cells(pairs):
        return Judgement("failed", broken)
    reasons = invalid_reasons(pairs, ignore)
    comparisons = gated_comparisons(pairs, settings)
    reasons += [f"{one.name}: {one.missing}" for one in comparisons if one.missing]
    if not comparisons and not reasons:
        reasons.append("no gated metric was measured")
    if reasons:
        return Judgement("inconclusive", reasons, [_unjudged(one) for one in comparisons])
    n = len(pairs)
    planned = looks if looks is not None else plan_for(n, n, settings, len(comparisons))
    look = max((look for look in planned if look.pairs <= n), key=lambda look: look.pairs)
    ratios = np.array([one.log_ratios for one in comparisons])[:, : look.pairs]
    effects = np.array([one.log_min_effect for one in comparisons])
    decision = decide(ratios, effects, look)
    metrics = [_judged(one, ratios[row], decision, row, look) for row, one in enumerate(comparisons)]
    if decision.any_regressed:
        return Judgement("regression", [_slower(one) for one in metrics if one.outcome == "regression"], metrics, look)
    if decision.all_cleared:
        return Judgement("pass", [], metrics, look)
    return Judgement(None, _why_undecided(metrics, look, settings, len(comparisons)), metrics, look)


def plan_for(min_pairs: int, max_pairs: int, settings: GateSettings, metrics: int) -> list[Look]:
    """The looks for so many gated metrics at the settings' error rates."""
    return plan_looks(min_pairs, max_pairs, alpha=settings.alpha, beta=settings.beta, metrics=metrics)


def conclude(
    judgement: Judgement,
    settings: GateSettings,
    *,
    baseline: SideInfo,
    candidate: SideInfo,
    pairs: Sequence[tuple[Run, Run]],
    max_pairs: int,
    order: Sequence[tuple[str, str]] = (),
    order_seed: int | None = None,
) -> GateVerdict:
    """The final document; what is still undecided is inconclusive."""
    verdict: Verdict = judgement.verdict or "inconclusive"
    warnings = [text for text in (different_machines(pairs), not_interleaved(pairs), busy_elsewhere(pairs)) if text]
    provenance = next((cell.provenance for pair in pairs for cell in pair[1].cells.values()), None)
    return GateVerdict(
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        summary=_summary(verdict, judgement, len(pairs)),
        reasons=judgement.reasons,
        warnings=warnings,
        baseline=_with_commit(baseline, [pair[0] for pair in pairs]),
        candidate=_with_commit(candidate, [pair[1] for pair in pairs]),
        pairs=len(pairs),
        max_pairs=max_pairs,
        ended_early=judgement.verdict in ("pass", "regression") and len(pairs) < max_pairs,
        order=[f"{first[0]}{second[0]}" for first, second in order[: len(pairs)]],
        order_seed=order_seed,
        alpha=settings.alpha,
        beta=settings.beta,
        look_alpha=judgement.look.alpha if judgement.look else 0.0,
        look_beta=judgement.look.beta if judgement.look else 0.0,
        metrics=judgement.metrics,
        provenance=provenance,
    )


def _judged(one: Comparison, ratios: np.ndarray, decision: Decision, row: int, look: Look) -> MetricVerdict:
    n = len(ratios)
    # The interval has the level of the test, or the nearest one that so many pairs can reach.
    tested = float(decision.level[row])
    level = max(tested if tested > 0 else SHOWN_LEVEL, reachable_p(n))
    best, worst = (float(bound(ratios, level)) for bound in (lower_bound, upper_bound))
    outcome: Outcome = "undecided"
    if decision.regressed[row]:
        outcome = "regression"
    elif decision.cleared[row]:
        outcome = "improved" if worst < 0 else "ok"
    result = _described(one, outcome)
    ends = sorted((relative_change(one.metric, best), relative_change(one.metric, worst)))
    result.change = relative_change(one.metric, float(center(ratios)))
    result.change_low, result.change_high = ends
    result.confidence = 1 - 2 * level
    result.p, result.level, result.p_reachable = float(decision.p[row]), tested, reachable_p(n)
    result.method = "sign-flip permutation" if n < EXACT_BELOW else "studentised bootstrap of the median"
    result.pairs = n
    return result


def _unjudged(one: Comparison) -> MetricVerdict:
    result = _described(one, "invalid")
    result.reason = one.missing or "the runs are not valid"
    return result


def _described(one: Comparison, outcome: Outcome) -> MetricVerdict:
    return MetricVerdict(
        cell_id=one.cell_id,
        metric=one.metric.key,
        label=one.metric.label,
        unit=one.metric.unit,
        higher_is_better=one.metric.higher_is_better,
        min_effect=one.min_effect,
        outcome=outcome,
        pairs=len(one.baseline),
        baseline=_median(one.baseline),
        candidate=_median(one.candidate),
        baseline_runs=one.baseline,
        candidate_runs=one.candidate,
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return stdlib_statistics.median(known) if known else None


def _changed(one: MetricVerdict) -> str:
    """`TTFT p50 +7.1% [+5.2%, +9.3%]`"""
    assert one.change is not None
    assert one.change_low is not None
    assert one.change_high is not None
    return f"{one.label} {one.change:+.1%} [{one.change_low:+.1%}, {one.change_high:+.1%}]"


def _slower(one: MetricVerdict) -> str:
    return f"{one.cell_id}: {_changed(one)}, beyond its minimum effect of {one.min_effect:.0%}"


def _why_undecided(metrics: Sequence[MetricVerdict], look: Look, settings: GateSettings, family: int) -> list[str]:
    """Lines that say what stands between these pairs and an answer."""
    open_ones = [one for one in metrics if one.outcome == "undecided"]
    reasons = []
    if look.alpha == 0:
        reached = (
            f"{look.pairs} pair{'s' if look.pairs != 1 else ''} can reach p = {reachable_p(look.pairs):.3g} at best"
        )
        reasons.append(
            f"{reached}; a regression in one of {family} gated metrics at an error rate of {settings.alpha:g} needs "
            f"{_pairs_needed(settings.alpha, family)} pairs"
        )
    for one in open_ones:
        limits = f"{one.min_effect:.0%} and {PASS_MULTIPLE * one.min_effect:.0%}"
        reasons.append(f"{one.cell_id}: {_changed(one)} shows neither a regression nor its absence (limits {limits})")
    if open_ones:
        reasons.append(
            "more pairs (--max-pairs), a quieter machine or larger minimum effects decide more; --calibrate says which"
        )
    return reasons


def _pairs_needed(alpha: float, family: int) -> int:
    return next(n for n in range(1, 65) if reachable_p(n) <= alpha / max(family, 1))


def _summary(verdict: Verdict, judgement: Judgement, pairs: int) -> str:
    counted = f"{pairs} pair{'s' if pairs != 1 else ''}"
    metrics = f"{len(judgement.metrics)} gated metric{'s' if len(judgement.metrics) != 1 else ''}"
    if verdict == "pass":
        return f"no regression in {metrics} after {counted}"
    if verdict == "regression":
        slower = [one for one in judgement.metrics if one.outcome == "regression"]
        return f"regression in {len(slower)} of {metrics} after {counted}"
    if verdict == "failed":
        return f"the candidate fails where the baseline works ({counted})"
    return f"no answer after {counted}: {judgement.reasons[0]}"


def _with_commit(side: SideInfo, runs: Sequence[Run]) -> SideInfo:
    made = next((cell.provenance for run in runs for cell in run.cells.values()), None)
    if side.git_commit is None and made is not None:
        side.git_commit, side.git_dirty = made.git_commit, made.git_dirty
    return side
