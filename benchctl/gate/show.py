"""The gate's verdict and a calibration in the terminal."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from benchctl.gate.calibrate import POWER, Calibration
from reports import formatting
from reports.verdict import GateVerdict, Outcome, Verdict
from reports.verdict_text import interval_text, limit_text, percent, value_text

_VERDICTS: dict[Verdict, str] = {
    "pass": "bold green",
    "regression": "bold red",
    "failed": "bold red",
    "inconclusive": "bold yellow",
}
_OUTCOMES: dict[Outcome, str] = {
    "regression": "red",
    "ok": "green",
    "improved": "bold green",
    "undecided": "yellow",
    "invalid": "yellow",
}


def render_verdict(verdict: GateVerdict) -> RenderableType:
    cells = dict.fromkeys(one.cell_id for one in verdict.metrics)
    parts: list[RenderableType] = [Padding(_cell(verdict, cell_id), (0, 0, 1, 0)) for cell_id in cells]
    parts += [Text(f"warning: {text}", "yellow") for text in verdict.warnings]
    parts += [Text(f"  {reason}", "dim") for reason in verdict.reasons if reason not in verdict.summary]
    took = f" in {formatting.seconds(verdict.duration_s)}" if verdict.duration_s is not None else ""
    early = f" (ended early, {verdict.max_pairs} were allowed)" if verdict.ended_early else ""
    parts.append(Text.assemble((verdict.verdict, _VERDICTS[verdict.verdict]), ": ", verdict.summary, took, early))
    return Group(*parts)


def render_calibration(calibration: Calibration) -> RenderableType:
    """A table, the rates, and the `[gate.min_effect]` table to copy into the suite."""
    table = _table(f"{calibration.pairs} A/A pairs on this machine")
    counts = list(calibration.metrics[0].detectable)
    for name in ("cell", "metric", "pair noise", *(f"found with {count}" for count in counts), "limit", "suggested"):
        table.add_column(name, justify="left" if name in ("cell", "metric") else "right")
    for one in calibration.metrics:
        found = [_share(one.detectable[count]) for count in counts]
        tight = one.suggested is None or one.suggested > one.min_effect
        table.add_row(
            one.cell_id,
            one.label,
            _share(math.expm1(one.noise)),
            *found,
            _share(one.min_effect),
            Text(_share(one.suggested), "yellow" if tight else "green"),
        )
    rates = (
        f"false alarms {calibration.false_alarm_rate:.2%} (stated: at most {calibration.alpha:.0%}), passes "
        f"{calibration.pass_rate:.1%}, inconclusive {calibration.inconclusive_rate:.1%}, after "
        f"{calibration.mean_pairs:.1f} pairs on average"
    )
    explained = (
        f"found with N: the smallest slowdown that N pairs find {POWER:.0%} of the time; suggested: the smallest limit "
        f"whose double {calibration.max_pairs} pairs find as often"
    )
    parts: list[RenderableType] = [Padding(table, (0, 0, 1, 0)), Text(rates), Text(explained, "dim")]
    parts += [Text(f"warning: {text}", "yellow") for text in calibration.problems]
    return Group(*parts, Text(""), Text(suggested_table(calibration)))


def suggested_table(calibration: Calibration) -> str:
    """TOML for the suite: per metric the largest suggestion over the cells."""
    lines = ["[gate.min_effect]"]
    for key in dict.fromkeys(one.metric for one in calibration.metrics):
        suggestions = [one.suggested for one in calibration.metrics if one.metric == key]
        known = [value for value in suggestions if value is not None]
        if len(known) < len(suggestions):
            lines.append(f"# {key}: too noisy on this machine for any limit")
        else:
            lines.append(f"{key} = {max(known):.3f}")
    return "\n".join(lines)


def _cell(verdict: GateVerdict, cell_id: str) -> Table:
    table = _table(cell_id)
    for name in ("", "baseline", "candidate", "change", "interval", "limit"):
        table.add_column(name, justify="right" if name else "left")
    table.add_column("")
    for one in verdict.metrics:
        if one.cell_id != cell_id:
            continue
        style = _OUTCOMES[one.outcome]
        table.add_row(
            one.label,
            value_text(one, one.baseline),
            value_text(one, one.candidate),
            Text(percent(one.change), style),
            f"{interval_text(one)} ({one.confidence:.0%})" if one.confidence is not None else interval_text(one),
            limit_text(one),
            Text(one.reason or one.outcome, style),
        )
    return table


def _share(value: float | None) -> str:
    return formatting.UNKNOWN if value is None else f"{value:.1%}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
