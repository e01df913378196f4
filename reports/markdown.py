"""Markdown that fits a pull-request comment: problems first, one table per group, what each choice buys."""

from __future__ import annotations

from collections.abc import Sequence

from reports import formatting
from reports.directory import ResultSet
from reports.goodput import GOODPUT_NOTE, goodput_rows
from reports.metrics import pick
from reports.reference import reference_rows
from reports.remarks import remarks
from reports.schema import CellResult
from reports.view import COMPARED, View, known_columns

# GitHub refuses comments above 65,536 characters.
MAX_CHARACTERS = 65_000
_COLUMNS = pick("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "itl_p99_s")
_STARTS = pick("to_healthy_cold_s", "to_healthy_warm_s")


def render_markdown(results: ResultSet) -> str:
    """The report as GitHub-flavoured Markdown, at most `MAX_CHARACTERS` long (whole sections are left out then)."""
    view = View(results)
    sections = [
        _heading(view),
        _problems(view),
        *_groups(view),
        _goodput(view),
        _comparisons(view),
        _references(view),
        _unsupported(view),
        _remarks(view),
        _footer(view),
    ]
    text = ""
    left_out = 0
    for section in sections:
        if not section:
            continue
        if len(text) + len(section) > MAX_CHARACTERS - 100:
            left_out += 1
        else:
            text += section + "\n"
    if left_out:
        text += f"\n_{left_out} more sections did not fit; see the HTML report._\n"
    return text


def _heading(view: View) -> str:
    counts = ", ".join(f"{number} {status}" for status, number in view.status_counts().items())
    lines = [f"## benchctl: {escape_cell(view.source.title)}", "", f"{view.number_of_cells}: {counts or 'none'}"]
    if view.source.index is not None and view.source.index.interrupted:
        lines[-1] += " (interrupted: partial results)"
    return "\n".join(lines) + "\n"


def _problems(view: View) -> str:
    lines = [
        f"- **{cell.status}** `{escape_code(cell.cell_id)}`: {escape_cell(cell.reason or 'no reason given')}"
        for cell in view.problems
    ]
    for cell in view.with_failures:
        assert cell.metrics is not None
        causes = ", ".join(f"{number} {cause}" for cause, number in cell.metrics.errors.items())
        lines.append(f"- `{escape_code(cell.cell_id)}`: {cell.metrics.failed} failed requests ({escape_cell(causes)})")
    return "\n".join(["### Problems", "", *lines, ""]) if lines else ""


def _groups(view: View) -> list[str]:
    sections = []
    for group in view.tables:
        cells = [cell for _, cell in group.rows]
        columns = [group.throughput, *_COLUMNS, *known_columns(_STARTS, cells)]
        rows = [[label, *(metric.text(cell) for metric in columns)] for label, cell in group.rows]
        title = f"### {escape_cell(group.model)}: {escape_cell(group.title)}"
        sections.append("\n".join([title, "", _table(["", *(metric.label for metric in columns)], rows), ""]))
    return sections


def _goodput(view: View) -> str:
    rows = [
        [row.variant, row.traffic, row.slo, row.requests_per_s, row.share, row.requests] for row in goodput_rows(view)
    ]
    if not rows:
        return ""
    header = ["", "", "SLO", "Goodput req/s", "Share", "Requests"]
    return "\n".join(["### Goodput", "", GOODPUT_NOTE, "", _table(header, rows, 3), ""])


def _comparisons(view: View) -> str:
    rows = []
    for comparison in view.comparisons():
        ratios = [formatting.ratio(comparison.ratio(metric)) for metric in COMPARED]
        rows.append([comparison.label, f"{comparison.group.model}: {comparison.group.title}", *ratios])
    if not rows:
        return ""
    return "\n".join(["### What each choice buys", "", _table(["", "", *(m.label for m in COMPARED)], rows, 2), ""])


def _references(view: View) -> str:
    rows = [
        [row.cell_id, row.metric.label, row.reference, row.ours, row.ratio, row.target, row.limit]
        for row in reference_rows(view)
    ]
    if not rows:
        return ""
    header = ["", "", "Reference", "Here", "Here / reference", "Target", "Limit"]
    source = escape_cell(view.source.reference_source or "")
    return "\n".join(["### Reference figures", "", source, "", _table(header, rows, 2), ""])


def _unsupported(view: View) -> str:
    reasons: dict[str, list[CellResult]] = {}
    for cell in view.with_status("unsupported"):
        reasons.setdefault(cell.reason or "no reason given", []).append(cell)
    if not reasons:
        return ""
    lines = ["### Unsupported here", ""]
    for reason, cells in reasons.items():
        names = ", ".join(dict.fromkeys(f"`{escape_code(view.variant_label(cell.config))}`" for cell in cells))
        lines.append(f"- {names}: {escape_cell(reason)}")
    return "\n".join([*lines, ""])


def _remarks(view: View) -> str:
    lines = [f"- {escape_cell(one.text)} ({escape_cell(one.where)})" for one in remarks(view.cells)]
    return "\n".join(["### Remarks", "", *lines, ""]) if lines else ""


def _footer(view: View) -> str:
    if not view.cells:
        return ""
    made = view.cells[0].provenance
    gpus = ", ".join(str(gpu.get("name", "GPU")) for gpu in made.gpus)
    commit = f"commit {made.git_commit[:12]}{' + changes' if made.git_dirty else ''}" if made.git_commit else None
    commits = {cell.provenance.git_commit for cell in view.cells}
    if len(commits) > 1:
        commit = f"results of {len(commits)} different commits (--resume kept earlier ones)"
    parts = [commit, gpus or made.cpu, f"benchctl {made.benchctl_version}", made.started_at]
    return f"<sub>{' · '.join(escape_cell(part) for part in parts if part)}</sub>\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """The first `texts` columns hold text, the others numbers."""
    lines = ["| " + " | ".join(escape_cell(text) for text in header) + " |"]
    lines.append("|" + "---|" * texts + "---:|" * (len(header) - texts))
    lines += ["| " + " | ".join(escape_cell(text) for text in row) + " |" for row in rows]
    return "\n".join(lines)


def escape_cell(text: str) -> str:
    """Text that cannot break out of a table cell, become markup or notify anybody."""
    flat = " ".join(text.split())
    for character in "\\`*_[]<>|#~":
        flat = flat.replace(character, f"&#{ord(character)};" if character in "<>|" else f"\\{character}")
    return flat.replace("@", "@\u200b")


def escape_code(text: str) -> str:
    return " ".join(text.split()).replace("`", "'").replace("|", "¦")
