"""The short forms of `scripts/soak.py`; the long one (`--minutes 30`) runs by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("minutes", "max_growth_mib"), [(1, 32), pytest.param(5, 8, marks=pytest.mark.nightly)])
def test_mixed_traffic_leaves_nothing_behind(minutes: int, max_growth_mib: int, tmp_path: Path) -> None:
    report_file = tmp_path / "soak.json"
    # Caches fill and allocators settle in a short time: only gross growth counts there.
    command = [sys.executable, "scripts/soak.py", "--minutes", str(minutes), "--max-growth-mib", str(max_growth_mib)]
    done = subprocess.run([*command, "--json", str(report_file)], cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    report = json.loads(report_file.read_text())
    assert report["problems"] == []
    assert done.returncode == 0
    assert min(report["outcomes"].values()) > 10
    assert len(report["outcomes"]) == 5
    assert report["preemptions"] > 0
    assert report["prefix_cache_hits"] > 0
