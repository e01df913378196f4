"""Where files live on disk."""

from __future__ import annotations

import os
from pathlib import Path


def benchctl_cache_dir() -> Path:
    """Root of benchctl's caches: `$BENCHCTL_CACHE_DIR`, else `$XDG_CACHE_HOME/benchctl`, else `~/.cache/benchctl`.

    Below it: `models/` (pulled checkpoints), `compile/` (compiled graphs), `kernels/`, `bytecode/`. Not created here.
    """
    if explicit := os.environ.get("BENCHCTL_CACHE_DIR"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "benchctl"


def cache_root(chosen: str | None) -> Path:
    """Root of the caches of compiled code: `--compilation-cache-dir`, else `benchctl_cache_dir()`."""
    return Path(chosen).expanduser() if chosen else benchctl_cache_dir()
