"""A mock in a thread of the test, and loads against it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchctl.loadgen.options import LoadOptions, LoadOutcome
from benchctl.loadgen.run import run_load
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
    loop.run_until_complete(server.start())
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
    **options: Any,
) -> LoadOutcome:
    schedule = build_schedule(arrival, len(workload.requests), seed)
    return run_load(
        LoadOptions(**{"url": url, "model": "mock", "workers": 1, **options}),
        workload,
        schedule,
        output=output,
        cancel=cancel,
    )


def read_log(path: Path) -> dict[int, dict[str, Any]]:
    """The mock's log by request index."""
    entries = (json.loads(line) for line in path.read_text().splitlines())
    return {int(entry["id"]): entry for entry in entries}
