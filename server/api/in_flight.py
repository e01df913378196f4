"""How much the API processes that share a port have in the engine: the bound of the queue is that of all together."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

MAX_PROCESSES = 64
_SLOT_BYTES = 8


class InFlight:
    """Counts of `count` processes in shared memory; each sets its own and sees those of all.

    Nobody waits for anybody: two processes that admit at the same moment may exceed a bound by what they admit then.
    """

    def __init__(self, runtime_dir: str, index: int, count: int) -> None:
        """Raises OSError when the file of several processes cannot be had."""
        self._index = index if count > 1 else 0
        memory: bytearray | mmap.mmap
        if count == 1:
            memory = bytearray(_SLOT_BYTES)
        else:
            fd = os.open(Path(runtime_dir) / "in-flight", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Whichever process comes first makes it, zeroed. Allocated now: a full disk must not kill us later.
                os.posix_fallocate(fd, 0, MAX_PROCESSES * _SLOT_BYTES)
                memory = mmap.mmap(fd, MAX_PROCESSES * _SLOT_BYTES)
            finally:
                os.close(fd)
        self._counts = memoryview(memory).cast("q")[: max(1, count)]

    def set(self, own: int) -> None:
        """This process has `own` sequences in the engine."""
        self._counts[self._index] = own

    def total(self) -> int:
        """Sequences that all processes have there."""
        return sum(self._counts)
