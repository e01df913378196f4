"""Runs as the gate and `compare` see them: one matrix run (or result file) each, its cells by id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reports.directory import REPORT_STEM, load_results
from reports.results import INDEX_NAME
from reports.schema import CellResult
from server.errors import UserError


@dataclass(frozen=True, slots=True)
class Run:
    """One server run: everything that was measured between one launch of the benchmark and its end."""

    path: Path
    cells: dict[str, CellResult]

    @property
    def started_at(self) -> str:
        return min((cell.provenance.started_at for cell in self.cells.values()), default="")


def load_run(path: Path) -> Run:
    """Read one run: a result file, or the directory of a matrix or of single runs.

    Raises UserError as `reports.directory.load_results` does, and when a cell is there twice.
    """
    cells: dict[str, CellResult] = {}
    for result in load_results(path).results:
        if result.cell_id in cells:
            raise UserError(
                f"{path}: holds cell {result.cell_id} twice; give repeated runs a directory each, below one directory"
            )
        cells[result.cell_id] = result
    return Run(path, cells)


def load_runs(path: Path) -> list[Run]:
    """Read the repeated runs of one side: `path` is a single run, or a directory with a run in each subdirectory.

    Runs come in the order of their names, which is how a gate numbers them. Raises UserError as `load_run` does.
    """
    if path.is_dir() and not _is_run(path):
        folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and _is_run(folder))
        if folders:
            return [load_run(folder) for folder in folders]
    return [load_run(path)]


def _is_run(folder: Path) -> bool:
    return (folder / INDEX_NAME).is_file() or any(file.stem != REPORT_STEM for file in folder.glob("*.json"))
