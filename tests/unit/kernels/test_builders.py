"""Kernels compiled by other processes, for a GPU that this machine need not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton")

from server.kernels import builders
from server.kernels.builders import Builders, Job

JOB = Job(
    module="server.kernels.activation",
    kernel="_silu_and_mul_kernel",
    tensors=["bfloat16", "bfloat16"],
    scalars=[],
    constants=[256, 1024, True],
    options={"num_warps": 4, "num_stages": 2, "launch_pdl": True},
    target=("cuda", 90, 32),
)

BUILD_AGAIN = """
import sys
import msgspec, triton
from server.kernels.build import build
from server.kernels.builders import Job
hits = []
triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
build(msgspec.json.decode(sys.argv[1], type=Job))
print(hits)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def test_a_built_kernel_lies_in_the_cache_where_the_next_process_finds_it(cache: Path) -> None:
    pool = Builders(1)
    try:
        assert pool.build(JOB)
    finally:
        pool.close()
    assert len(list(cache.rglob("_silu_and_mul_kernel.cubin"))) == 1
    argv = [sys.executable, "-c", BUILD_AGAIN, msgspec.json.encode(JOB).decode()]
    again = subprocess.run(argv, check=True, capture_output=True, text=True, env=dict(os.environ))
    assert again.stdout == "[True]\n"


def test_a_failed_or_killed_builder_leaves_the_work_to_the_worker(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Builders(1)
    try:
        assert not pool.build(msgspec.structs.replace(JOB, kernel="missing"))
        assert "missing" in caplog.text
        assert not pool.build(JOB), "not asked again"
    finally:
        pool.close()
    caplog.clear()
    pool = Builders(1)
    try:
        pool._processes[0].kill()
        assert not pool.build(JOB)
        assert "a builder process has ended" in caplog.text or "Broken pipe" in caplog.text
    finally:
        pool.close()
    assert all(process.returncode is not None for process in pool._processes)


@pytest.mark.parametrize(
    ("cores", "filled", "count"), [(2, False, 0), (4, False, 2), (8, False, 4), (64, False, 6), (64, True, 0)]
)
def test_builders_are_for_cold_caches_and_many_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, filled: bool, count: int
) -> None:
    started: list[int] = []

    class Fake:
        def __init__(self, count: int) -> None:
            started.append(count)

        def close(self) -> None:
            started.append(-1)

    fake: Any = Fake
    monkeypatch.setattr(builders, "Builders", fake)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    if filled:
        (tmp_path / "key").mkdir()
    builders.start_if_cold(tmp_path)
    assert (builders.current() is not None) == bool(count)
    builders.stop()
    assert started == ([count, -1] if count else [])
    assert builders.current() is None
