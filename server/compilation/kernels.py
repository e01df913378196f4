"""The caches beside that of compiled graphs: of kernels (ours in Triton, flash-attn-4's) and of Python's bytecode."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from server.bytecode import bytecode_root
from server.paths import cache_root


@dataclass(frozen=True, slots=True)
class FolderInfo:
    directory: Path
    files: int
    bytes: int


def kernel_caches(cache_dir: str | None) -> list[FolderInfo]:
    """Every kernel cache below `--compilation-cache-dir`; what other processes remove meanwhile is left out.

    Links are not followed: what they lead to is not ours to list or remove.
    """
    root = cache_root(cache_dir) / "kernels"
    if not root.is_dir() or root.is_symlink():
        return []
    return [_measure(path) for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink()]


def clear_kernel_caches(cache_dir: str | None) -> tuple[int, int]:
    """Remove them; returns how many files and bytes. Raises OSError."""
    infos = kernel_caches(cache_dir)
    for info in infos:
        shutil.rmtree(info.directory)
    return sum(info.files for info in infos), sum(info.bytes for info in infos)


def bytecode_cache(cache_dir: str | None) -> FolderInfo | None:
    """Python's bytecode below `--compilation-cache-dir`, None where there is none (see `server.bytecode`)."""
    directory = bytecode_root(cache_root(cache_dir))
    return _measure(directory) if directory.is_dir() and not directory.is_symlink() else None


def clear_bytecode_cache(cache_dir: str | None) -> tuple[int, int]:
    """Remove it; returns how many files and bytes. Raises OSError."""
    info = bytecode_cache(cache_dir)
    if info is None:
        return 0, 0
    shutil.rmtree(info.directory)
    return info.files, info.bytes


def _measure(directory: Path) -> FolderInfo:
    sizes = []
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.lstat().st_size)
        except FileNotFoundError:
            continue
    return FolderInfo(directory, len(sizes), sum(sizes))
