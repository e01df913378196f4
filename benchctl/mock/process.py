"""Runs the mock as a process: signals, the ready file, the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import uvloop

from benchctl.mock.script import MockOptions
from benchctl.mock.server import MockServer
from reports.results import write_text


def serve_mock(options: MockOptions, *, ready_file: Path | None = None, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises UserError: address taken, bad script, files that cannot be written."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, ready_file, on_ready))


async def _serve(options: MockOptions, ready_file: Path | None, on_ready: Callable[[str], None]) -> None:
    server = MockServer(options)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await server.start()
    try:
        if ready_file is not None:
            ready = {"url": server.url, "port": int(server.url.rpartition(":")[2]), "pid": os.getpid()}
            write_text(ready_file, json.dumps(ready))
        on_ready(server.url)
        await stopped.wait()
    finally:
        await server.close()
