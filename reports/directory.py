"""The results that a report is made of: a matrix directory, a directory of single runs, or one result file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from reports.results import INDEX_NAME, read_index, read_result
from reports.schema import CellResult, MatrixIndex
from server.errors import UserError

REPORT_STEM = "report"
"""Rendered reports are `report.<format>`; `report.json` is therefore not a result."""


class ResultSet(msgspec.Struct, kw_only=True):
    """Results in the order of their matrix."""

    title: str
    results: list[CellResult]
    index: MatrixIndex | None = None
    """None: single runs, not a matrix."""
    missing: list[str] = []
    """File names that the index lists and that are not there (an interrupted run)."""

    @property
    def reference_source(self) -> str | None:
        return self.index.reference[0].source if self.index and self.index.reference else None


def load_results(path: Path) -> ResultSet:
    """Read results from a directory or a single file.

    Raises UserError: no such path, no results in it, or a file that is broken or of another schema version.
    """
    if path.is_file():
        result = read_result(path)
        return ResultSet(title=result.cell_id, results=[result])
    if not path.is_dir():
        raise UserError(f"{path}: no such result directory or file")
    if (path / INDEX_NAME).is_file():
        index = read_index(path)
        # Names come from a file that anybody may have written: they stay inside the directory.
        files = [path / Path(name).name for name in index.cells]
        results = [read_result(file) for file in files if file.is_file()]
        missing = [file.name for file in files if not file.is_file()]
        return ResultSet(title=index.suite, results=results, index=index, missing=missing)
    results = [read_result(file) for file in sorted(path.glob("*.json")) if file.stem != REPORT_STEM]
    if not results:
        raise UserError(f"{path}: holds no results (no {INDEX_NAME}, no *.json); name a directory that a run wrote")
    results.sort(key=lambda result: result.provenance.started_at)
    return ResultSet(title=path.resolve().name, results=results)
