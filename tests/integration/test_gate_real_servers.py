"""The gate over real servers: a checkout against one whose engine steps take longer.

One pair of runs only, so that the suite stays quick: enough to see that both sides ran their own code, that the
metrics point the right way, and that a single pair is never a verdict.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = """
models = ["tiny"]
modes = ["eager"]
backends = ["TORCH_SDPA"]
starts = ["cold"]
[server]
max_model_len = 256
max_num_seqs = 4
[client]
lag_bound_s = 5.0  # a busy machine is no reason to skip what is seen here
[[loads]]
workload = { name = "synthetic", num_requests = 12, input_len = 16, output_len = 12 }
arrivals = [{ name = "concurrency", concurrency = 2 }]
[gate]
max_disturbed = 0
[gate.min_effect]
output_tokens_per_s = 0.03
tpot_p50_s = 0.05
"""
SLOWER = """

_execute = ModelRunner.execute


def _slow_execute(self, step):
    time.sleep(0.1)
    return _execute(self, step)


ModelRunner.execute = _slow_execute
"""


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    tree = tmp_path / "slower"
    tree.mkdir()
    for package in ("benchctl", "server", "workloads", "reports"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    with (tree / "server" / "worker" / "model_runner.py").open("a") as file:
        file.write(SLOWER)
    return tree


def test_a_slower_checkout_is_measured_as_slower(slower: Path, tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text(SUITE)
    argv = [sys.executable, "-m", "benchctl", "gate", str(ROOT), str(slower), "--max-pairs", "1"]
    argv += ["--suite", str(tmp_path / "suite.toml"), "--output", str(tmp_path / "out")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 3, done.stdout + done.stderr
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_bytes())
    assert verdict["verdict"] == "inconclusive"
    assert "1 pair can reach p = 0.5" in verdict["reasons"][0]
    changes = {one["metric"]: one["candidate"] / one["baseline"] - 1 for one in verdict["metrics"]}
    assert changes["tpot_p50_s"] > 0.3
    assert changes["output_tokens_per_s"] < -0.2
    assert len(list((tmp_path / "out" / "logs").iterdir())) == 2
