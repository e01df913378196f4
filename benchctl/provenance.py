"""Where and with what a result was made: software, hardware, commit."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import benchctl
from benchctl.nvml import describe_gpus
from reports.schema import Provenance

# Packages whose version can move a number in a result.
PACKAGES = (
    "flash-attn",
    "flash-attn-4",
    "httptools",
    "msgspec",
    "numpy",
    "pyzmq",
    "sglang",
    "starlette",
    "tokenizers",
    "torch",
    "triton",
    "uvicorn",
    "uvloop",
    "vllm",
)
_SECRET_FLAGS = ("--api-key", "--header")


def collect_provenance(command: Sequence[str] | None = None) -> Provenance:
    """Describe this machine and installation; what cannot be found out stays null.

    `command` defaults to `sys.argv`; values of flags that carry secrets are masked.
    """
    commit, dirty = git_state(Path(benchctl.__file__).parent)
    return Provenance(
        started_at=utc_now(),
        benchctl_version=benchctl.__version__,
        git_commit=commit,
        git_dirty=dirty,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu_model(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        gpus=describe_gpus(),
        packages=_package_versions(),
        hostname_hash=hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        command=mask_secrets(["benchctl", *sys.argv[1:]] if command is None else list(command)),
    )


def utc_now() -> str:
    """ISO 8601, to the second, e.g. `2026-03-14T09:26:53+00:00`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def git_state(directory: Path) -> tuple[str | None, bool | None]:
    """(commit, has uncommitted changes to tracked files) of the checkout around `directory`; Nones outside of one."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None, None
    status = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return commit, None if status is None else bool(status)


def mask_secrets(argv: Sequence[str]) -> list[str]:
    """The command line with the values of `--api-key` and `--header` replaced by `***`."""
    masked: list[str] = []
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        if masked and masked[-1] in _SECRET_FLAGS:
            masked.append("***")
        elif equals and flag in _SECRET_FLAGS:
            masked.append(f"{flag}=***")
        else:
            masked.append(argument)
    return masked


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _package_versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str | None:
    fields = _proc_fields("/proc/cpuinfo")
    return fields.get("model name") or fields.get("Model") or platform.processor() or None


def _memory_bytes() -> int | None:
    total = _proc_fields("/proc/meminfo").get("MemTotal", "").removesuffix(" kB")
    return int(total) * 1024 if total.isdigit() else None


def _proc_fields(path: str) -> dict[str, Any]:
    """`key : value` lines of a /proc file, the first of each key."""
    fields: dict[str, Any] = {}
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields
