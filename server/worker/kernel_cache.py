"""Where Triton keeps compiled kernels: below benchctl's own cache, if only we can write there.

What lies there is loaded as machine code, so a directory that another user could have written to is not used.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

_VARIABLE = "TRITON_CACHE_DIR"


def use_kernel_cache(root: Path, fallback: Path) -> None:
    """Let Triton cache below `root`, or below the private directory `fallback` of this server where `root` cannot be
    trusted or written to. Whoever sets the environment variable TRITON_CACHE_DIR has decided otherwise."""
    if os.environ.get(_VARIABLE):
        return
    directory = root / "triton"
    problem = why_unusable(directory)
    if problem is not None:
        logger.warning("kernels are not cached in %s: %s", directory, problem)
        directory = fallback / "triton"
    os.environ[_VARIABLE] = str(directory)


def why_unusable(directory: Path) -> str | None:
    """None if `directory` (made if it is missing) is ours alone to write to, else why not."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
    except OSError as error:
        return error.strerror
    if status.st_uid != os.geteuid():
        return f"it belongs to user id {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "it is writable by others"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "it is read-only"
    return None
