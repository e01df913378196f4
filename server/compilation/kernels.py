"""The caches of kernels that are compiled outside of compiled graphs: ours in Triton, flash-attn-4's."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from server.paths import cache_root


@dataclass(frozen=True, slots=True)
class KernelCacheInfo:
    directory: Path
    files: int
    bytes: int


def kernel_caches(cache_dir: str | None) -> list[KernelCacheInfo]:
    """Every kernel cache below `--compilation-cache-dir`; what other processes remove meanwhile is left out."""
    root = cache_root(cache_dir) / "kernels"
    if not root.is_dir():
        return []
    return [_measure(path) for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink()]


def clear_kernel_caches(cache_dir: str | None) -> tuple[int, int]:
    """Remove them; returns how many files and bytes. Raises OSError."""
    infos = kernel_caches(cache_dir)
    for info in infos:
        shutil.rmtree(info.directory)
    return sum(info.files for info in infos), sum(info.bytes for info in infos)


def _measure(directory: Path) -> KernelCacheInfo:
    sizes = []
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.lstat().st_size)
        except FileNotFoundError:
            continue
    return KernelCacheInfo(directory, len(sizes), sum(sizes))
