"""GitLab: a code-quality report for the merge-request widget and a metrics report to compare with the target branch."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from reports.verdict import GateVerdict, MetricVerdict
from reports.verdict_text import explain


def render_code_quality(verdict: GateVerdict, path: str = "pyproject.toml") -> str:
    """JSON for `artifacts:reports:codequality`: an entry per regression, undecided metric or other reason.

    `path` is the file that the entries point at: GitLab wants one, and a slower server has none.
    """
    entries = [
        _entry(
            explain(one), "critical" if one.outcome == "regression" else "minor", f"{one.cell_id} {one.metric}", path
        )
        for one in verdict.metrics
        if one.outcome in ("regression", "undecided")
    ]
    if verdict.verdict in ("failed", "inconclusive"):
        severity = "blocker" if verdict.verdict == "failed" else "major"
        entries += [_entry(reason, severity, reason, path) for reason in verdict.reasons]
    return json.dumps(entries, indent=2, ensure_ascii=False) + "\n"


def render_metrics(verdict: GateVerdict) -> str:
    """OpenMetrics text for `artifacts:reports:metrics`: the candidate's medians, compared with the target's."""
    families: dict[str, list[MetricVerdict]] = {}
    for one in verdict.metrics:
        if one.candidate is not None:
            families.setdefault(re.sub(r"[^a-zA-Z0-9_]", "_", f"benchctl_{one.metric}"), []).append(one)
    lines = []
    for name, members in families.items():
        lines.append(f"# TYPE {name} gauge")
        lines += [f'{name}{{cell="{_label(one.cell_id)}"}} {one.candidate:.9g}' for one in members]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _entry(description: str, severity: str, key: str, path: str) -> dict[str, Any]:
    return {
        "description": description,
        "check_name": "benchctl-gate",
        "fingerprint": hashlib.sha256(f"benchctl-gate {key}".encode()).hexdigest(),
        "severity": severity,
        "location": {"path": path, "lines": {"begin": 1}},
    }


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
