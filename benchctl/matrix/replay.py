"""A cell's traffic through the load generator."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from benchctl.loadgen.options import LoadOptions, LoadOutcome
from benchctl.loadgen.run import run_load
from benchctl.matrix.plan import Cell
from benchctl.matrix.progress import Progress
from benchctl.matrix.traffic import Traffic
from benchctl.targets import RunningServer


def replay_cell(
    cell: Cell,
    traffic: Traffic,
    server: RunningServer,
    *,
    records: Path,
    on_progress: Callable[[Progress], None],
    cancel: threading.Event,
) -> LoadOutcome:
    """Replay against a running server; a `Replay` of the matrix runner. Raises UserError as `run_load` does."""
    options = LoadOptions(
        url=server.url,
        model=server.model,
        endpoint=cell.config.endpoint,
        api_key=os.environ.get("OPENAI_API_KEY"),
        slos=tuple(cell.config.slos),
        **cell.config.client,
    )
    return run_load(
        options,
        traffic.workload,
        traffic.schedule,
        output=records,
        on_progress=on_progress,
        cancel=cancel,
        forced_lengths=traffic.forced_lengths,
    )
