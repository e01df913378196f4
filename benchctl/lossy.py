"""A stderr that loses text rather than fail: a server outlives the disk or the pipe that takes its log."""

from __future__ import annotations

import os
import sys
from typing import Any


class LossyStderr:
    """`sys.stderr` of the moment; what cannot be written (disk full, reader gone) is dropped."""

    def __init__(self) -> None:
        self._broken = False

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(text)
        except OSError:
            self._broken = True
            return len(text)

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except OSError:
            self._broken = True

    def close(self) -> None:
        """After a loss, let what is still buffered go nowhere: Python would turn it into exit code 120."""
        if self._broken:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stderr.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)
