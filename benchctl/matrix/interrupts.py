"""Ctrl-C and SIGTERM during a matrix: the first ends the cell in order, the second ends everything at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """Installed for the time of a `with`; only in the main thread.

    While a load runs (`graceful()`), the first signal sets `requested` and the current `cancel` event, so that the
    load returns what it has. At any other time, and at the second signal, KeyboardInterrupt is raised.
    """

    def __init__(self) -> None:
        self.requested = False
        self._cancel: threading.Event | None = None
        self._before: dict[int, object] = {}

    def shield(self) -> contextlib.AbstractContextManager[None]:
        """For short steps that a first signal must not tear, such as writing a result; `requested` says it came."""
        return self.graceful(threading.Event())

    @contextlib.contextmanager
    def graceful(self, cancel: threading.Event) -> Iterator[None]:
        self._cancel = cancel
        try:
            yield
        finally:
            self._cancel = None

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = not self.requested
        self.requested = True
        if first and self._cancel is not None:
            self._cancel.set()
        else:
            raise KeyboardInterrupt
