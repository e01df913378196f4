"""Digests are facts: equal in every process, whatever its hash seed, and pinned here against accidental change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workloads import build_workload
from workloads.arrivals import build_schedule, parse_arrival

_SCRIPT = """
from workloads import build_workload
from workloads.arrivals import build_schedule, parse_arrival
spec = {"input_len": {"distribution": "lognormal", "median": 90, "sigma": 1.0}, "num_prefixes": 2, "prefix_len": 1}
print(build_workload({"name": "synthetic", "num_requests": 50, **spec}, seed=11, tokenizer=None).digest)
print(build_workload({"name": "sharegpt-like", "num_requests": 50}, seed=11, tokenizer=None).digest)
for arrival in ("poisson:rate=9", "gamma:rate=9,burstiness=0.5", "ramp:start_rate=1,end_rate=9,duration_s=20"):
    print(build_schedule(parse_arrival(arrival), 50, 11).digest)
"""


def test_digests_do_not_depend_on_the_process() -> None:
    outputs = set()
    for hash_seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env=environment,
            cwd=Path(__file__).resolve().parents[3],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert len(set(outputs.pop().split())) == 5


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("synthetic", "0dd849e577faf3828bdd088d77dbe74919358a93b4eb2133801eaace107774fa"),
        ("sharegpt-like", "88d4e242d9c075b9b91bd9d795d71ca52808b25b1fbb4cdbad428f2952a39db5"),
    ],
)
def test_traffic_of_a_seed_is_pinned(name: str, digest: str) -> None:
    assert build_workload({"name": name, "num_requests": 20}, seed=0, tokenizer=None).digest == digest


def test_schedule_of_a_seed_is_pinned() -> None:
    assert (
        build_schedule(parse_arrival("poisson:rate=10"), 100, 0).digest
        == "bdcef388151d3d812008ea46e195effa8a0020ad24b580a151d7e363d3823fc8"
    )
