"""Every file that a gate leaves, and what it tells a CI system."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from benchctl.gate.calibrate import Calibration
from reports.ci_github import append_summary, render_annotations
from reports.ci_gitlab import render_code_quality, render_metrics
from reports.ci_markdown import render_verdict_markdown
from reports.junit import render_junit
from reports.results import explain_os_error, write_text
from reports.verdict import GateVerdict, verdict_json
from server.errors import UserError

FILES = {
    "verdict.json": verdict_json,
    "summary.md": render_verdict_markdown,
    "junit.xml": render_junit,
    "gl-code-quality.json": render_code_quality,
    "gl-metrics.txt": render_metrics,
}
"""File name in the output directory -> its renderer."""


def write_outputs(verdict: GateVerdict, directory: Path) -> list[Path]:
    """Write all of `FILES`. Raises UserError when one cannot be written."""
    _make(directory)
    return [write_text(directory / name, render(verdict)) for name, render in FILES.items()]


def write_calibration(calibration: Calibration, directory: Path) -> Path:
    """Write `calibration.json`; the file. Raises UserError when it cannot be written."""
    _make(directory)
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=2).decode()
    return write_text(directory / "calibration.json", f"{text}\n")


def tell_github(verdict: GateVerdict) -> list[str]:
    """Append the job summary where GitHub wants it; the annotation lines for standard output.

    Raises UserError when the summary cannot be written.
    """
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            append_summary(Path(summary), render_verdict_markdown(verdict))
        except OSError as error:
            raise UserError(f"GITHUB_STEP_SUMMARY {summary}: {error.strerror}") from None
    return render_annotations(verdict)


def on_github() -> bool:
    """Whether this is a step of a GitHub workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(explain_os_error(directory, error)) from error
