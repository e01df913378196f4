"""A timer of an event loop that fires at a nanosecond of CLOCK_MONOTONIC; the loop's own round to a millisecond."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from server.timerfd import TimerFd


class DeadlineTimer:
    """Calls `callback` from `loop` at the armed time; one time is armed at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._timer = TimerFd()
        self.arm = self._timer.arm
        loop.add_reader(self._timer.fileno(), self._fire)

    def close(self) -> None:
        self._loop.remove_reader(self._timer.fileno())
        self._timer.close()

    def _fire(self) -> None:
        self._timer.clear()
        self._callback()
