"""What builder processes compile without a GPU is what a worker with one looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EAGER_START = """
import json, sys
from pathlib import Path
from server.kernels import builders
builders._current = builders.Builders(4)
import triton
events = []
triton.knobs.compilation.listener = lambda **event: events.append((event["src"].name, event["cache_hit"]))
from tests.gpu.in_process_worker import start_worker
start_worker(Path(sys.argv[1]), mode="eager")
print(json.dumps(events))
"""


def test_a_cold_eager_start_compiles_nothing_in_the_worker(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    argv = [sys.executable, "-c", EAGER_START, str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    events = json.loads(done.stdout.splitlines()[-1])
    assert len(events) > 10
    assert [name for name, hit in events if not hit] == []
