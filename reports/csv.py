"""One row per cell, for spreadsheets and data frames. Raw SI numbers; what is not known is an empty field."""

from __future__ import annotations

import csv
import io
import json

from reports.directory import ResultSet
from reports.metrics import METRICS
from reports.view import load_and_arrival

_IDENTITY = ("cell_id", "status", "engine", "model", "mode", "attention_backend", "load", "arrival")


def render_csv(results: ResultSet) -> str:
    """CSV text with a header row; columns are stable within a major schema version (new ones are appended)."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*_IDENTITY, *METRICS, "reason", "errors", "config_digest", "git_commit", "started_at"])
    for result in results.results:
        config = result.config
        load, arrival = load_and_arrival(result)
        texts = [result.cell_id, result.status, config.engine, config.model, config.mode, config.attention_backend]
        row: list[str | float | None] = [*(_safe(text) for text in texts), _safe(load), _safe(arrival)]
        row += [metric.read(result) for metric in METRICS.values()]
        errors = json.dumps(result.metrics.errors) if result.metrics and result.metrics.errors else None
        row += [_safe(result.reason), _safe(errors), result.config_digest]
        row += [result.provenance.git_commit, result.provenance.started_at]
        writer.writerow(row)
    return buffer.getvalue()


def _safe(text: str | None) -> str | None:
    """A text that a spreadsheet would take for a formula gets a quote in front."""
    return f"'{text}" if text and text[0] in "=+-@\t\r" else text
