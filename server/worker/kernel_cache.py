"""Where Triton and flash-attn-4 keep compiled kernels: below benchctl's own cache, if only we can write there.

What lies there is loaded as machine code, so a directory that another user could have written to, or have linked to
another one, is not used.
"""

from __future__ import annotations

import importlib
import logging
import os
import stat
import tempfile
from pathlib import Path

from server.config import ServerConfig
from server.paths import cache_root

logger = logging.getLogger(__name__)

_TRITON = "TRITON_CACHE_DIR"
_FLASH = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_FLASH_SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def choose_kernel_cache(config: ServerConfig) -> Path:
    """`use_kernel_cache` below the cache directory of `config`; returns Triton's directory."""
    root = cache_root(config.compilation.cache_dir) / "kernels"
    use_kernel_cache(root, Path(config.runtime_dir or tempfile.gettempdir()))
    return Path(os.environ[_TRITON])


def use_kernel_cache(root: Path, fallback: Path) -> None:
    """Point both packages to directories below `root`, or below the private directory `fallback` of this server where
    `root` cannot be trusted or written to. Call before either is imported. Whoever has set their environment variables
    has decided otherwise."""
    if _TRITON not in os.environ:
        os.environ[_TRITON] = str(_usable(root, "triton", fallback))
    if _FLASH not in os.environ:
        os.environ[_FLASH] = str(_usable(root, "flash_attn_cute", fallback))
        os.environ[_FLASH_SWITCH] = "1"


def hash_triton() -> None:
    """Let Triton compute the key that stands for its own version. It hashes all of itself, libraries of hundreds of
    megabytes included, and keeps the outcome, but threads that ask for it at the same time each compute it: call this
    before kernels are compiled in several. Where Triton has the function elsewhere, nothing happens."""
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):
        try:
            compute = getattr(importlib.import_module(module), "triton_key", None)
        except ImportError:
            continue
        if callable(compute):
            compute()
            return


def _usable(root: Path, name: str, fallback: Path) -> Path:
    # Who may write to the root could put another directory of ours, or a link, in the place of the one below.
    for directory in (root, root / name):
        problem = why_unusable(directory)
        if problem is not None:
            logger.warning("kernels are not cached in %s, every start compiles them: %s", directory, problem)
            return fallback / name
    return root / name


def why_unusable(directory: Path) -> str | None:
    """None if `directory` (made if it is missing) is ours alone to write to and no link, else why not."""
    try:
        if directory.is_symlink():
            return (
                "it is a symbolic link, and links in the cache are not followed: remove it; to keep the cache "
                "elsewhere, set --compilation-cache-dir or BENCHCTL_CACHE_DIR"
            )
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.lstat()
    except OSError as error:
        return error.strerror
    if status.st_uid != os.geteuid():
        return f"it belongs to user id {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"it is writable by others (chmod go-w {directory}, if nobody else has written there)"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "it is read-only"
    return None
