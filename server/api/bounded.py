"""Runs foreign Python code (chat templates) in a thread, for a bounded time."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class TooSlow(BaseException):
    """Raised inside the thread from outside; no `except Exception` of the code it ends can catch it."""


class _Job(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._expired = False
        self._done = False

    def run(self) -> T:
        with self._lock:
            if self._expired:
                raise TimeoutError
            self._thread_id = threading.get_ident()
        try:
            return self._run_to_end()
        except TooSlow:
            raise TimeoutError from None

    def _run_to_end(self) -> T:
        try:
            return self._function()
        finally:
            # Once this is set nobody raises in this thread any more; an exception already on its way arrives before.
            with self._lock:
                self._done = True

    def interrupt(self) -> None:
        with self._lock:
            self._expired = True
            if self._thread_id is not None and not self._done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), ctypes.py_object(TooSlow))


class BoundedExecutor:
    """A few threads whose jobs are interrupted when they take too long.

    The interruption is an asynchronous exception: it ends any Python code, so also any loop that a Jinja template can
    write, but not a call into C that does not return.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[[], T], timeout_s: float) -> T:
        """Result of `function`. Raises what it raises, or TimeoutError `timeout_s` seconds from now."""
        loop = asyncio.get_running_loop()
        job = _Job(function)
        timer = loop.call_later(timeout_s, job.interrupt)
        try:
            return await loop.run_in_executor(self._executor, job.run)
        finally:
            timer.cancel()
