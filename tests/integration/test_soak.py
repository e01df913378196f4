"""The short form of `scripts/soak.py`; the long form runs by hand or at night."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_half_a_minute_of_mixed_traffic_leaves_nothing_behind(tmp_path: Path) -> None:
    report_file = tmp_path / "soak.json"
    # Caches fill and allocators settle in so short a time: only gross growth counts here.
    command = [sys.executable, "scripts/soak.py", "--minutes", "0.5", "--max-growth-mib", "32"]
    done = subprocess.run([*command, "--json", str(report_file)], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    report = json.loads(report_file.read_text())
    assert report["problems"] == []
    assert done.returncode == 0
    assert min(report["outcomes"].values()) > 10
    assert len(report["outcomes"]) == 5
    assert report["preemptions"] > 0
    assert report["prefix_cache_hits"] > 0
