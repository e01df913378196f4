"""One measured cell in the history: what it was, where it was made, and every metric's value."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import msgspec

from reports.metrics import METRICS
from reports.schema import CellResult

RECORD_VERSION = "1.0"


class Record(msgspec.Struct, kw_only=True, frozen=True):
    """A cell's figures at one commit. Seconds are SI; a metric that is not known is left out."""

    record_version: str = RECORD_VERSION
    id: str
    """Of the content: adding the same result twice changes nothing."""
    commit: str
    """Full hash, or `unknown` for results made outside of a git checkout."""
    dirty: bool | None = None
    committed_at: str | None = None
    """ISO 8601; null where the commit was not known to git when the result was added."""
    measured_at: str
    cell_id: str
    config_digest: str
    workload_digest: str | None = None
    machine: str
    """GPUs, else the CPU and its number of cores; values from different machines are never put in one series."""
    metrics: dict[str, float]

    @property
    def order(self) -> tuple[str, str]:
        """Sorts records by commit time, then by the time of measuring."""
        return self.committed_at or self.measured_at, self.measured_at

    @property
    def series(self) -> tuple[str, str, str]:
        """What may be compared over commits: cell, workload, machine."""
        return self.cell_id, self.workload_digest or "", self.machine


def records_of(results: Iterable[CellResult], repository: Path) -> list[Record]:
    """Records of the results that are `ok`; times of commits are asked of the git checkout at `repository`."""
    times: dict[str, str | None] = {}
    records = []
    for result in results:
        if result.status != "ok":
            continue
        commit = result.provenance.git_commit
        if commit is not None and commit not in times:
            times[commit] = commit_time(repository, commit)
        values = {key: value for key, metric in METRICS.items() if (value := metric.read(result)) is not None}
        content = msgspec.json.encode((result.cell_id, result.config_digest, result.provenance, values), order="sorted")
        records.append(
            Record(
                id=hashlib.sha256(content).hexdigest()[:16],
                commit=commit or "unknown",
                dirty=result.provenance.git_dirty,
                committed_at=times[commit] if commit is not None else None,
                measured_at=result.provenance.started_at,
                cell_id=result.cell_id,
                config_digest=result.config_digest,
                workload_digest=result.workload.digest if result.workload else None,
                machine=machine_name(result),
                metrics={key: float(value) for key, value in values.items()},
            )
        )
    return records


def machine_name(result: CellResult) -> str:
    """`2 x NVIDIA H200`, or `AMD EPYC 9654 96-Core Processor, 16 cores`."""
    made = result.provenance
    names = [str(gpu.get("name", "GPU")) for gpu in made.gpus]
    if names:
        return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
    return f"{made.cpu or 'unknown CPU'}, {made.cpu_count or '?'} cores"


def commit_time(repository: Path, commit: str) -> str | None:
    """The committer's date in UTC, ISO 8601; None when git does not know the commit."""
    command = ["git", "-C", str(repository), "show", "-s", "--date=iso-strict-local", "--format=%cd", commit, "--"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False, env={**os.environ, "TZ": "UTC"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
