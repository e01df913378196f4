"""Errors that a user can mend."""

from __future__ import annotations

import errno
import re


class UserError(Exception):
    """Bad input or an impossible request: one line that says what, where and how to mend it.

    Commands print it without a traceback and exit with `exit_code` (2: usage or bad input). Messages quote names out
    of files that strangers wrote: control characters (line ends, terminal escapes) and halves of surrogate pairs are
    shown as Python escapes.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """`text` with control characters and halves of surrogate pairs as Python escapes: fit for a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_CURES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the whole system has no file descriptors left",
    errno.ENOSPC: "free some space or inodes, or set TMPDIR and BENCHCTL_CACHE_DIR to another disk",
    errno.EDQUOT: "free some of your quota, or set TMPDIR and BENCHCTL_CACHE_DIR to another disk",
    errno.ENOMEM: "free some memory",
}


# How torch's allocator, the CUDA runtime and driver, its libraries and Triton say that a GPU has no memory left.
_DEVICE_FULL = re.compile(r"(CUDA|HIP)[^\n]*out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED|out of memory[^\n]*(CUDA|HIP)")


def device_out_of_memory(error: BaseException) -> str | None:
    """The first sentences of an error that says that a GPU has no memory left; None for any other error.

    torch has several types for it (`OutOfMemoryError`, `AcceleratorError`, plain `RuntimeError`), and so have the
    libraries below it: only their words are alike.
    """
    text = str(error)
    if type(error).__name__ != "OutOfMemoryError" and not (
        isinstance(error, RuntimeError) and _DEVICE_FULL.search(text)
    ):
        return None
    return ". ".join(text.strip().split("\n")[0].split(". ")[:2]).rstrip(". ")


def exhausted(error: BaseException) -> UserError | None:
    """The line for an error that says what this machine lacks (by `errno`, or memory); None for any other.

    ZMQ's errors are no OSErrors, but carry an `errno` as well; torch's are known by name, without importing it.
    """
    text = str(error)
    if (full := device_out_of_memory(error)) is not None:
        return UserError(
            f"{full}: free memory that other processes hold on the GPU, or lower --gpu-memory-utilization, "
            "--max-num-seqs or --max-num-batched-tokens"
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return UserError(f"out of memory ({text or 'MemoryError'}): lower --cpu-kv-cache-gib or --max-num-seqs")
    cure = _CURES.get(getattr(error, "errno", None) or 0)
    return UserError(f"{error}: {cure}") if cure is not None else None
