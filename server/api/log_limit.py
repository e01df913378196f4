"""Keeps clients from filling the log: a warning that a request provokes is written a few times in a while, and then
counted."""

from __future__ import annotations

import logging
import time

BURST = 5
"""Records of one kind per window."""
WINDOW_S = 10.0
_MAX_KINDS = 256


class LogLimit(logging.Filter):
    """Drops records beyond `BURST` per window and format string; the next one that passes says how many."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[str, tuple[float, int]] = {}
        """Format string -> start of its window, records in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        kind = str(record.msg)
        begin, count = self._windows.get(kind, (now, 0))
        if now - begin >= WINDOW_S:
            if count > BURST:
                record.msg = f"{kind} ({count - BURST} more of these were not logged)"
            begin, count = now, 0
        elif kind not in self._windows and len(self._windows) >= _MAX_KINDS:
            self._windows.clear()
        self._windows[kind] = (begin, count + 1)
        return count < BURST
