"""GitHub: annotations on standard output and the job summary."""

from __future__ import annotations

from pathlib import Path

from reports.verdict import GateVerdict
from reports.verdict_text import explain

# GitHub shows ten annotations of each kind per step and drops the rest.
MAX_ANNOTATIONS = 10


def render_annotations(verdict: GateVerdict) -> list[str]:
    """Workflow commands, a line each: `::error` for what fails the gate, `::warning` for what it could not tell."""
    lines = []
    if verdict.verdict in ("regression", "failed"):
        slower = [(one.cell_id, explain(one)) for one in verdict.metrics if one.outcome == "regression"]
        broken = [("candidate failed", reason) for reason in verdict.reasons] if verdict.verdict == "failed" else []
        lines += [_command("error", title, text) for title, text in (slower + broken)]
    elif verdict.verdict == "inconclusive":
        lines += [_command("error", "benchctl gate is inconclusive", verdict.summary)]
        lines += [_command("warning", "inconclusive", reason) for reason in verdict.reasons]
    lines += [_command("warning", "benchctl gate", text) for text in verdict.warnings]
    if not lines:
        lines.append(_command("notice", "benchctl gate", verdict.summary))
    kept: list[str] = []
    for kind in ("error", "warning", "notice"):
        kept += [line for line in lines if line.startswith(f"::{kind}")][:MAX_ANNOTATIONS]
    return kept


def append_summary(path: Path, markdown: str) -> None:
    """Append to `$GITHUB_STEP_SUMMARY`, which other steps share. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        file.write(markdown + "\n")


def _command(kind: str, title: str, text: str) -> str:
    return f"::{kind} title={_property(title)}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
