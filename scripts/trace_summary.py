"""Where the steps of a profile went: device time per kernel, pauses between kernels, host time per phase.

benchctl serve MODEL --profile DIR --profile-skip 60 --profile-steps 40     # then send it requests and stop it
python scripts/trace_summary.py DIR/trace.json
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_PAUSE_BOUNDS_US = (5, 20, 100, 1000)
_NAME_WIDTH = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--top", type=int, default=25, help="kernels to list")
    arguments = parser.parse_args()
    events: list[dict[str, Any]] = msgspec.json.decode(arguments.trace.read_bytes())["traceEvents"]
    spans = [event for event in events if event.get("cat") == "benchctl"]
    steps = len({span["args"]["step"] for span in spans if span["name"] == "schedule"})
    if not steps:
        raise SystemExit(f"{arguments.trace}: holds no steps; was it written by benchctl serve --profile?")
    print(f"{steps} steps")
    print_device(
        sorted((e for e in events if e.get("cat") in _ON_DEVICE), key=lambda e: float(e["ts"])), steps, arguments.top
    )
    totals: Counter[str] = Counter()
    for span in spans:
        totals[span["name"]] += span["dur"]
    for phase, total in totals.most_common():
        print(f"{total / steps:10.1f} us/step  host, {phase}")


def print_device(kernels: list[dict[str, Any]], steps: int, top: int) -> None:
    """Device time, if the trace is of a GPU."""
    if not kernels:
        print("no kernels: the profile is of a CPU")
        return
    span = kernels[-1]["ts"] + kernels[-1]["dur"] - kernels[0]["ts"]
    busy = sum(kernel["dur"] for kernel in kernels)
    print(f"{span / steps:10.1f} us/step  from first to last kernel, {len(kernels) / steps:.0f} kernels a step")
    print(f"{busy / steps:10.1f} us/step  busy")
    pauses: Counter[int] = Counter()
    for before, after in pairwise(kernels):
        pause = max(0.0, after["ts"] - before["ts"] - before["dur"])
        pauses[next((bound for bound in _PAUSE_BOUNDS_US if pause <= bound), 10**9)] += pause
    for bound in sorted(pauses):
        label = f"up to {bound} us" if bound < 10**9 else "longer"
        print(f"{pauses[bound] / steps:10.1f} us/step  pauses {label}")
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kernel in kernels:
        times[kernel["name"][:_NAME_WIDTH]] += kernel["dur"]
        counts[kernel["name"][:_NAME_WIDTH]] += 1
    for name, total in times.most_common(top):
        print(f"{total / steps:10.1f} us/step  {counts[name] / steps:6.1f} x {total / counts[name]:8.2f} us  {name}")


if __name__ == "__main__":
    main()
