"""Bytecode of the installed packages, kept by us where nobody else keeps it.

Images are often built without bytecode and run with PYTHONDONTWRITEBYTECODE, or from a directory that they may not
write to. Python then compiles the sources of torch, sympy and Triton anew at every start, half of the time that
importing them takes. There our processes keep bytecode below the cache directory (PYTHONPYCACHEPREFIX), and at the
first start a process of low priority (`server.byte_compile`) makes it ahead of the worker's imports. Where torch has
bytecode beside it nothing is done: the prefix would hide it.

Bytecode is code. The folder must belong to us and be closed to everybody else; then nobody else can have written
anything in it, whatever the umask made of the folders below. It is of one torch: the files' own check against their
sources (time and size) is worth little across images whose files all bear the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from server.worker.kernel_cache import why_unusable

COMPLETE = ".complete"
"""File in the folder once everything has been compiled ahead."""

_PREFIX = "PYTHONPYCACHEPREFIX"
_SWITCH = "PYTHONDONTWRITEBYTECODE"


def bytecode_root(cache_root: Path) -> Path:
    """Where all bytecode of ours lies."""
    return cache_root / "bytecode"


def choose_folder(cache_root: Path) -> tuple[Path | None, str | None]:
    """The folder (made if it is missing) that child processes are to keep bytecode in, None where they need none; and
    a warning where they would need one that cannot be trusted or written to."""
    source = _source_without_bytecode()
    if source is None:
        return None, None
    root = bytecode_root(cache_root).absolute()
    problem = _why_untrusted(root)
    if problem is None:
        version = hashlib.sha256(source.with_name("version.py").read_bytes()).hexdigest()[:16]
        folder = root / f"{sys.implementation.cache_tag}-{version}"
        problem = _why_untrusted(folder)
        if problem is None:
            return folder, None
    return None, f"Python's bytecode is not cached in {root}, every start compiles torch's sources: {problem}"


def child_environment(folder: Path) -> dict[str, str]:
    """Our environment for a process that keeps bytecode in `folder`."""
    return {name: value for name, value in os.environ.items() if name != _SWITCH} | {_PREFIX: str(folder)}


def _source_without_bytecode() -> Path | None:
    """torch's `__init__.py`, if it has no bytecode beside it and Python will not write any. Imports nothing."""
    if os.environ.get(_PREFIX) or sys.pycache_prefix is not None:
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin)
    compiled = Path(importlib.util.cache_from_source(str(source)))
    if compiled.exists() or not source.with_name("version.py").is_file():
        return None
    beside = compiled.parent if compiled.parent.exists() else source.parent
    if not os.environ.get(_SWITCH) and os.access(beside, os.W_OK | os.X_OK):
        return None
    return source


def _why_untrusted(folder: Path) -> str | None:
    problem = why_unusable(folder)
    if problem is None and (mode := stat.S_IMODE(folder.stat().st_mode)) & (stat.S_IRWXG | stat.S_IRWXO):
        return f"others can enter it (mode {mode:04o}): chmod 700 it, if nobody else has written there"
    return problem


class ByteCompiler:
    """The process that fills `folder`. It ends by itself, and with its parent."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError when it cannot be started."""
        self.started_ns = time.monotonic_ns()
        # Two cores are the worker's and the API's; one process keeps ahead of an import, as it compiles and no more.
        processes = max(1, min(12, len(os.sched_getaffinity(0)) - 2))
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "server.byte_compile", str(folder), str(processes), str(os.getpid())],
            env=child_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self._popen.pid)

    def close(self) -> None:
        """Kill what still runs of it, and reap it."""
        # Until it is reaped the number of its group belongs to nobody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        os.close(self.pidfd)


def wants_compiling(folder: Path) -> bool:
    """Whether nothing has compiled everything ahead yet."""
    return not (folder / COMPLETE).exists()
