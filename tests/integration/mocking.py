"""A mock in a thread of the test, and loads against it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchctl.loadgen import process
from benchctl.loadgen.assign import split
from benchctl.loadgen.options import LoadOptions, LoadOutcome
from benchctl.loadgen.records import Records, create_records
from benchctl.loadgen.run import run_load
from benchctl.metrics import compute_metrics
from benchctl.mock.script import MockOptions
from benchctl.mock.server import MockServer
from workloads import build_workload
from workloads.arrivals import build_schedule
from workloads.base import Workload


@contextlib.contextmanager
def running_mock(**options: Any) -> Iterator[MockServer]:
    """A mock that serves until the end of the block; its log is written then."""
    server = MockServer(MockOptions(**options))
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(server.start())
    except BaseException:
        loop.close()
        raise
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:

        async def close() -> None:
            await server.close()
            await asyncio.sleep(0)  # aborted transports end in the next turn

        asyncio.run_coroutine_threadsafe(close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def synthetic(requests: int, output_len: int = 8, input_len: int = 4) -> Workload:
    spec = {"name": "synthetic", "num_requests": requests, "input_len": input_len, "output_len": output_len}
    return build_workload(spec, seed=0, tokenizer=None)


def load(
    url: str,
    workload: Workload,
    arrival: dict[str, Any],
    output: Path,
    *,
    seed: int = 0,
    cancel: Any = None,
    on_progress: Any = None,
    **options: Any,
) -> LoadOutcome:
    schedule = build_schedule(arrival, len(workload.requests), seed)
    return run_load(
        LoadOptions(**{"url": url, "model": "mock", "workers": 1, **options}),
        workload,
        schedule,
        output=output,
        cancel=cancel,
        on_progress=on_progress,
    )


def load_here(
    url: str, workload: Workload, arrival: dict[str, Any], output: Path, *, seed: int = 0, **options: Any
) -> LoadOutcome:
    """As `load` with one worker, but that one in this process: no time for starting it, and open to monkeypatching."""
    schedule = build_schedule(arrival, len(workload.requests), seed)
    wanted = LoadOptions(**{"url": url, "model": "mock", "workers": 1, **options})
    (share,) = split(workload.requests, schedule, 1)
    start_ns = time.monotonic_ns() + 20_000_000
    create_records(output, {"start_ns": start_ns})
    ours, theirs = multiprocessing.Pipe()
    ours.send(process.Start(start_ns))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        finished = runner.run(process._serve(share, wanted, output, theirs))
    ours.close()
    theirs.close()
    metrics = compute_metrics(Records(output), start_ns=start_ns, offered_rate=schedule.offered_rate)
    return LoadOutcome(
        records=output,
        metrics=metrics,
        interrupted=False,
        aborted=finished.aborted,
        error_details=finished.error_details,
    )


def read_log(path: Path) -> dict[int, dict[str, Any]]:
    """The mock's log by request index."""
    entries = (json.loads(line) for line in path.read_text().splitlines())
    return {int(entry["id"]): entry for entry in entries}
