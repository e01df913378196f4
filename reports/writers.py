"""All report formats by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from reports.csv import render_csv
from reports.directory import REPORT_STEM, ResultSet
from reports.markdown import render_markdown
from reports.results import write_text
from reports.schema import ReportDocument
from server.errors import UserError


def _render_html(results: ResultSet) -> str:
    # Plotly and Jinja are wanted for this one format only.
    from reports.html import render_html

    return render_html(results)


def render_json(results: ResultSet) -> str:
    """All results in one JSON document, a `ReportDocument`."""
    document = ReportDocument(index=results.index, results=results.results)
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


FORMATS: dict[str, Callable[[ResultSet], str]] = {
    "html": _render_html,
    "md": render_markdown,
    "csv": render_csv,
    "json": render_json,
}
"""Format (and file suffix) -> renderer."""


def parse_formats(text: str) -> list[str]:
    """`"html,md"` as a list without duplicates. Raises UserError for an unknown format."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise UserError(f"--format {text!r}: choose from {', '.join(FORMATS)}, with commas between")
    return names


def write_reports(results: ResultSet, directory: Path, formats: Sequence[str] = ("html", "md", "csv")) -> list[Path]:
    """Write `report.<format>` for each format into `directory`; the files in order.

    Raises UserError when a file cannot be written, after all that can: where the megabytes of an HTML page do not fit,
    the Markdown may.
    """
    written: list[Path] = []
    failed: list[UserError] = []
    for name in formats:
        try:
            written.append(write_text(directory / f"{REPORT_STEM}.{name}", FORMATS[name](results)))
        except UserError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    return written
