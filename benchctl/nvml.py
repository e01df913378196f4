"""NVIDIA GPUs through NVML: what they are and how they do. Empty answers where there is no driver or no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

# The software power cap is not among these: a card under full load runs at its power limit.
_THROTTLED = (
    pynvml.nvmlClocksEventReasonHwSlowdown
    | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
    | pynvml.nvmlClocksEventReasonSwThermalSlowdown
)


@contextlib.contextmanager
def nvml_handles() -> Iterator[list[Any]]:
    """Handles of all GPUs that NVML shows; an empty list without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            handles = []
        yield handles
    finally:
        pynvml.nvmlShutdown()


def describe_gpus() -> list[dict[str, Any]]:
    """One dict per GPU: name, memory_bytes, compute_capability, power_limit_w, driver, cuda; unknown ones left out."""
    with nvml_handles() as handles:
        return [_without_nones(_describe(handle)) for handle in handles]


def sample_gpus(handles: list[Any]) -> dict[str, float]:
    """`gpu0.power_w`, `gpu0.sm_clock_mhz`, ... of this moment; a figure that the GPU does not give is left out."""
    samples: dict[str, float] = {}
    for number, handle in enumerate(handles):
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        use = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
        reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
        figures = {
            "power_w": None if power_mw is None else power_mw / 1000,
            "sm_clock_mhz": _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "temperature_c": _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            "memory_used_bytes": None if memory is None else memory.used,
            "utilization_percent": None if use is None else use.gpu,
            "throttled": None if reasons is None else bool(reasons & _THROTTLED),
            "processes": None if processes is None else len(processes),
        }
        samples |= {f"gpu{number}.{name}": float(value) for name, value in figures.items() if value is not None}
    return samples


def _describe(handle: Any) -> dict[str, Any]:
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    limit_mw = _ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    cuda = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return {
        "name": _ask(pynvml.nvmlDeviceGetName, handle),
        "memory_bytes": None if memory is None else int(memory.total),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "power_limit_w": None if limit_mw is None else limit_mw / 1000,
        "driver": _ask(pynvml.nvmlSystemGetDriverVersion),
        "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    }


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where the GPU, the driver or the permission does not give one."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _without_nones(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
