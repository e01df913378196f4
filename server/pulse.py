"""Proof of life: a page of shared memory into which each child counts and which the supervisor reads.

A pipe would do as well until its reader is suspended: then it fills up and stops its writers. A store into shared
memory costs nothing, wakes nobody and cannot block. The memory is a memfd, which needs no /dev/shm.
"""

from __future__ import annotations

import mmap
import os
import struct

_SLOT = struct.Struct("=Q")


def create_pulse_fd() -> int:
    """A memfd of one page, zeroed: one slot for each of up to 512 children."""
    fd = os.memfd_create("benchctl-pulse", os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd


class Pulse:
    """One slot of the page behind `fd`, which is not closed here. The child beats, the supervisor reads."""

    def __init__(self, fd: int, slot: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE)
        self._offset = slot * _SLOT.size
        self._count = 0

    def beat(self) -> None:
        """Count one turn of the process' main loop."""
        self._count += 1
        _SLOT.pack_into(self._page, self._offset, self._count)

    def read(self) -> int:
        """Beats so far; 0 until the process has begun to beat."""
        count: int = _SLOT.unpack_from(self._page, self._offset)[0]
        return count

    def close(self) -> None:
        self._page.close()
