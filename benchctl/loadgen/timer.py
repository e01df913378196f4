"""A timer that fires at a nanosecond of CLOCK_MONOTONIC.

Event loops round their timers to a millisecond (uvloop, and epoll's timeout), which is as long as the mean gap of 1,000
requests per second: the spacing of an arrival process would be lost. A timerfd wakes the loop at the time itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class DeadlineTimer:
    """Calls `callback` from `loop` at the armed time; one time is armed at once (linux, timerfd_create(2))."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._fd = _LIBC.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = _Itimerspec()
        self._reference = ctypes.byref(self._spec)
        self._armed_ns: int | None = None
        loop.add_reader(self._fd, self._fire)

    def arm(self, deadline_ns: int) -> None:
        """Fire at `deadline_ns`, at once when that is past; replaces what was armed."""
        if deadline_ns == self._armed_ns:
            return
        self._armed_ns = deadline_ns
        self._spec.value_s, self._spec.value_ns = divmod(max(deadline_ns, 1), 1_000_000_000)
        if _LIBC.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, self._reference, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fire(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._armed_ns = None
        self._callback()
