"""Reads the files of model folders, which strangers wrote: regular ones only, and of bounded size. Imports no torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from server.errors import UserError

MAX_BYTES = 16 << 20
"""Far more than any configuration, shard index or chat template needs."""
MAX_TOKENIZER_BYTES = 256 << 20
"""A `tokenizer.json` of a vocabulary of 256k tokens has 35 MB."""


def is_there(path: Path) -> bool:
    """Whether there is a regular file at `path`, possibly behind links (a hub cache is made of those).

    Raises UserError for anything else there: a model is not served as if it lacked a file that cannot be read.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise UserError(f"{path}: a link to a file that is missing; download the model again") from None
        return False
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError:  # a NUL byte in the name
        return False
    _check_regular(path, status)
    return True


def read_bounded(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The content of the regular file at `path`.

    Raises UserError when it is missing, unreadable, longer than `limit` bytes, or a pipe, device or directory.
    """
    try:
        # The open of a pipe would wait for somebody who writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _check_regular(path, os.fstat(descriptor))
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(limit + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(data) > limit:
        raise UserError(f"{path}: longer than {limit >> 20} MiB, which no such file needs; put the right one there")
    return data


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror})")


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise UserError(f"{path}: {kind}, not a regular file; put the file itself there")


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
