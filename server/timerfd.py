"""A file that becomes readable at a nanosecond of CLOCK_MONOTONIC (linux, timerfd_create(2)).

Event loops and pollers round their timeouts to a millisecond, which is as long as the mean gap of 1,000 requests per
second, and a good part of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

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


class TimerFd:
    """One time is armed at once. Raises OSError where the system has no more descriptors."""

    def __init__(self) -> None:
        self._fd = _LIBC.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = _Itimerspec()
        self._reference = ctypes.byref(self._spec)
        self._armed_ns: int | None = None

    def fileno(self) -> int:
        return self._fd

    def arm(self, deadline_ns: int) -> None:
        """Readable from `deadline_ns` on, at once when that is past; replaces what was armed."""
        if deadline_ns == self._armed_ns:
            return
        self._armed_ns = deadline_ns
        self._spec.value_s, self._spec.value_ns = divmod(max(deadline_ns, 1), 1_000_000_000)
        if _LIBC.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, self._reference, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def clear(self) -> None:
        """No longer readable, until it is armed again. To be called when it was."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._armed_ns = None

    def close(self) -> None:
        os.close(self._fd)
