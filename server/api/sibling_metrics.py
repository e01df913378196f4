"""Figures of several API processes that share a port: whichever of them is scraped answers for all.

Each writes a snapshot of its own counts into the server's private runtime directory; the others add them up.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from server.api.metrics import Metrics

INTERVAL_S = 0.25
"""How old the figures of the other processes may be."""


class SiblingMetrics:
    """Process `index` of `count`."""

    def __init__(self, metrics: Metrics, runtime_dir: str, index: int, count: int) -> None:
        self._metrics = metrics
        self._own = _path(runtime_dir, index)
        self._others = [_path(runtime_dir, other) for other in range(count) if other != index]

    async def publish(self) -> None:
        """Keep the snapshot of this process fresh, for ever."""
        written = b""
        while True:
            if self._others and (snapshot := self._metrics.snapshot()) != written:
                temporary = self._own.with_suffix(".tmp")
                temporary.write_bytes(snapshot)
                temporary.rename(self._own)
                written = snapshot
            await asyncio.sleep(INTERVAL_S)

    def others(self) -> list[bytes]:
        """The newest snapshots of the other processes, of those that have counted anything yet."""
        snapshots = []
        for path in self._others:
            with contextlib.suppress(FileNotFoundError):
                snapshots.append(path.read_bytes())
        return snapshots


def _path(runtime_dir: str, index: int) -> Path:
    return Path(runtime_dir) / f"api-{index}.metrics"
