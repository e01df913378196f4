"""Run cases: error against fp32, and time as the median of CUDA-graph replays over rotating inputs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from benchctl.kernelbench.case import Case, Instance, relative_error, tolerance

_ROTATED_BYTES = 256 << 20
"""Inputs are rotated until this much lies between two uses of one set: several times any GPU's L2 cache."""

_MAX_INSTANCES = 16
_REPLAYS = 15


@dataclass(frozen=True, slots=True)
class Roofline:
    """Ceilings measured on this card, in this run."""

    bytes_per_s: float
    """A large device-to-device copy, counting bytes read and written."""
    flops_per_s: float
    """A bf16 matrix product of 8192 x 8192 x 8192 on random data."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case; None where that part was not asked for."""

    kernel: str
    shape: str
    dtype: str
    error: float | None
    tolerance: float
    time_us: float | None = None
    tb_per_s: float | None = None
    tflop_per_s: float | None = None
    roofline_share: float | None = None
    """Time that the roofline allows over the measured time."""

    @property
    def passed(self) -> bool:
        return self.error is None or self.error <= self.tolerance

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed}


def measure_roofline(device: torch.device) -> Roofline:
    copy_s = _copy_seconds(torch.randn(1 << 30, dtype=torch.bfloat16, device=device))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    matmul_s = _replay_seconds([lambda: torch.mm(a, b, out=out)] * 4)
    return Roofline(bytes_per_s=4 * (1 << 30) / copy_s, flops_per_s=2 * 8192**3 / matmul_s)


def _copy_seconds(source: torch.Tensor) -> float:
    target = torch.empty_like(source)
    return _replay_seconds([lambda: target.copy_(source)])


def check(cases: Iterable[Case], *, interpreted: bool) -> Iterator[Row]:
    """Errors only."""
    for case in cases:
        yield Row(
            case.kernel,
            case.shape,
            str(case.dtype).removeprefix("torch."),
            _error(case.build(1)),
            tolerance(case.dtype, interpreted=interpreted),
        )


def measure(cases: Iterable[Case], roofline: Roofline) -> Iterator[Row]:
    """Error and time on a CUDA device."""
    for case in cases:
        error = _error(case.build(1))
        seconds = time_case(case)
        allowed = max(case.bytes / roofline.bytes_per_s, case.flops / roofline.flops_per_s)
        yield Row(
            case.kernel,
            case.shape,
            str(case.dtype).removeprefix("torch."),
            error,
            tolerance(case.dtype, interpreted=False),
            seconds * 1e6,
            case.bytes / seconds / 1e12,
            case.flops / seconds / 1e12,
            allowed / seconds,
        )


def time_case(case: Case) -> float:
    """Seconds per launch, launches back to back in one CUDA graph."""
    copies = max(1, min(_MAX_INSTANCES, _ROTATED_BYTES // max(case.bytes, 1)))
    instances = [case.build(seed) for seed in range(copies)]
    # Short kernels: enough launches that a replay is far longer than the resolution of the events.
    rounds = max(1, 32 // copies) if case.bytes < 64 << 20 else 2
    return _replay_seconds([instance.run for instance in instances] * rounds)


def _error(instance: Instance) -> float:
    expected = instance.expected()
    return relative_error(instance.run(), expected)


def _replay_seconds(launches: Sequence[Callable[[], object]]) -> float:
    """Median over replays of a graph that holds `launches`, per launch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(launches))
    return statistics.median(times)
