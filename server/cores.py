"""How many CPU cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that the process may run on, or what its control groups' quotas come to if that is less; at least 1.

    A container's limit is such a quota (`docker run --cpus 4`, Kubernetes' `limits.cpu`): more threads than that only
    get the process stopped for the rest of each period. Reads cgroup v2's `cpu.max` and v1's `cpu.cfs_quota_us`.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _folders(cgroups, membership) if (quota := _quota(folder)) is not None]
    return max(1, min(cores, *(math.ceil(quota) for quota in quotas)) if quotas else cores)


def _folders(cgroups: Path, membership: Path) -> list[Path]:
    """The control groups of this process that may bound its CPU time, up to the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        # Inside a container the path may be that of the host, which is not mounted: the root stands for it.
        group = root / path.lstrip("/")
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
    return folders


def _quota(folder: Path) -> float | None:
    """Cores' worth of time per period; None: no bound."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
