"""A gate's verdict as Markdown: the job summary, or a comment on a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from reports import formatting
from reports.markdown import MAX_CHARACTERS, escape_cell, escape_code
from reports.verdict import GateVerdict, MetricVerdict, SideInfo
from reports.verdict_text import MARKS, interval_text, limit_text, percent, value_text

_OUTCOMES = {
    "regression": "❌ slower",
    "ok": "✅ ok",
    "improved": "🚀 better",
    "undecided": "⚠️ undecided",
    "invalid": "⚠️ not judged",
}
_ORDER = ("regression", "invalid", "undecided", "improved", "ok")
MAX_REASONS = 10


def render_verdict_markdown(verdict: GateVerdict) -> str:
    """GitHub-flavoured Markdown, at most `MAX_CHARACTERS` long: rows that do not fit are counted instead."""
    head = [f"## benchctl gate: {MARKS[verdict.verdict]}", "", escape_cell(verdict.summary) + ".", ""]
    shown = [] if verdict.verdict == "regression" else verdict.reasons
    head += [f"- {escape_cell(reason)}" for reason in shown[:MAX_REASONS]]
    head += [f"- and {len(shown) - MAX_REASONS} more reasons"] if len(shown) > MAX_REASONS else []
    head += [f"- warning: {escape_cell(text)}" for text in verdict.warnings]
    foot = _footer(verdict)
    rows = [_row(one) for outcome in _ORDER for one in verdict.metrics if one.outcome == outcome]
    table = [
        "",
        "| | cell | metric | baseline | candidate | change | interval | limit |",
        "|---|---|---|---:|---:|---:|---|---:|",
    ]
    budget = MAX_CHARACTERS - sum(len(line) + 1 for line in [*head, *table, *foot]) - 100
    kept = 0
    for row in rows:
        budget -= len(row) + 1
        if budget < 0:
            break
        kept += 1
    left_out = [f"\n_{len(rows) - kept} more rows did not fit; see the JSON verdict._"] if kept < len(rows) else []
    return "\n".join([*head, *(table + rows[:kept] if rows else []), *left_out, *foot]) + "\n"


def _row(one: MetricVerdict) -> str:
    cells: Sequence[str] = (
        _OUTCOMES[one.outcome],
        f"`{escape_code(one.cell_id)}`",
        escape_cell(one.label),
        value_text(one, one.baseline),
        value_text(one, one.candidate),
        f"**{percent(one.change)}**" if one.outcome == "regression" else percent(one.change),
        interval_text(one) if one.outcome != "invalid" else escape_cell(one.reason or ""),
        limit_text(one),
    )
    return "| " + " | ".join(cells) + " |"


def _footer(verdict: GateVerdict) -> list[str]:
    return [
        "",
        f"<sub>baseline {_side(verdict.baseline)} · candidate {_side(verdict.candidate)} · {verdict.pairs} of at most "
        f"{verdict.max_pairs} pairs{' (ended early)' if verdict.ended_early else ''}"
        + (f" in {formatting.seconds(verdict.duration_s)}" if verdict.duration_s is not None else "")
        + "</sub>",
        "",
        f"<sub>A false alarm on any of {len(verdict.metrics)} metrics has probability at most {verdict.alpha:g}; a "
        f"pass in spite of a slowdown of twice the limit at most {verdict.beta:g}. Evidence is the server run.</sub>",
    ]


def _side(side: SideInfo) -> str:
    commit = f" ({side.git_commit[:12]}{' + changes' if side.git_dirty else ''})" if side.git_commit else ""
    return f"{escape_cell(side.label)}{commit}"
