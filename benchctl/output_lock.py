"""One writer per result directory: two loads whose records went into one file would be counted as one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType

from reports.results import explain_os_error
from server.errors import UserError


class OutputLock:
    """Held while a command writes into a directory; the kernel drops it with the process, so that none goes stale."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd: int | None = None

    def __enter__(self) -> OutputLock:
        """Raises UserError when another command writes into the directory, or it cannot be read."""
        try:
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise UserError(explain_os_error(self._directory, error)) from error
        self._fd = fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__(None, None, None)
            raise UserError(
                f"{self._directory}: another benchctl is writing its results here; wait for it, or choose another "
                "directory with --output"
            ) from None
        except OSError:  # a file system without locks
            pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None
