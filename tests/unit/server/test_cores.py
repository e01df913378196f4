from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.cores import usable_cores


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def cores(cgroups: Path, membership: str) -> int:
    file = cgroups.parent / "membership"
    file.write_text(membership)
    return usable_cores(cgroups, file)


def test_without_control_groups_it_is_the_affinity(cgroups: Path) -> None:
    assert usable_cores(cgroups, cgroups / "none") == 8
    assert cores(cgroups, "0::/\n") == 8


@pytest.mark.parametrize(
    ("quota", "number"),
    [("max 100000", 8), ("400000 100000", 4), ("250000 100000", 3), ("20000 100000", 1), ("1600000 100000", 8)],
)
def test_a_quota_bounds_it(cgroups: Path, quota: str, number: int) -> None:
    (cgroups / "cpu.max").write_text(quota + "\n")
    assert cores(cgroups, "0::/\n") == number


def test_the_tightest_of_the_groups_above_counts(cgroups: Path) -> None:
    group = cgroups / "pod" / "container"
    group.mkdir(parents=True)
    (cgroups / "pod" / "cpu.max").write_text("200000 100000\n")
    (group / "cpu.max").write_text("300000 100000\n")
    assert cores(cgroups, "0::/pod/container\n") == 2


def test_a_container_that_sees_its_own_group_as_the_root(cgroups: Path) -> None:
    (cgroups / "cpu.max").write_text("300000 100000\n")
    assert cores(cgroups, "0::/kubepods/pod1/abc\n") == 3


def test_version_one(cgroups: Path) -> None:
    group = cgroups / "cpu" / "docker"
    group.mkdir(parents=True)
    (group / "cpu.cfs_period_us").write_text("100000\n")
    membership = "12:memory:/docker\n3:cpu,cpuacct:/docker\n1:name=systemd:/docker\n0::/docker\n"
    for quota, number in (("-1", 8), ("500000", 5)):
        (group / "cpu.cfs_quota_us").write_text(quota + "\n")
        assert cores(cgroups, membership) == number


@pytest.mark.parametrize("nonsense", ["", "x y", "1", "100 0"])
def test_nonsense_is_no_bound(cgroups: Path, nonsense: str) -> None:
    (cgroups / "cpu.max").write_text(nonsense)
    assert cores(cgroups, "0::/\n") == 8
