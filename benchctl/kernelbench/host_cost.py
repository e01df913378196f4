"""Host time of one launch: what an eager step pays per kernel, however fast the GPU is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from benchctl.kernelbench.case import Case

_CALLS = 200


@dataclass(frozen=True, slots=True)
class HostCost:
    kernel: str
    shape: str
    microseconds: float
    """Median time of a call, without waiting for the device."""


def host_costs(cases: Iterable[Case]) -> Iterator[HostCost]:
    """Cases should be small: a full launch queue would be timed as host cost."""
    for case in cases:
        run = case.build(0).run
        for _ in range(20):
            run()
        torch.cuda.synchronize()
        times = []
        for _ in range(_CALLS):
            start = time.perf_counter_ns()
            run()
            times.append(time.perf_counter_ns() - start)
            if len(times) % 50 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        yield HostCost(case.kernel, case.shape, statistics.median(times) / 1e3)
