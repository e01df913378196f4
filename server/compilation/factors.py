"""What a compiled graph depends on: the factors of its cache key.

All of them are readable text, so that `explain` can say in words why an entry was not used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

import server
from server.models.config import ModelConfig

FORMAT = "1"
"""Raise when the meaning of the files of an entry changes."""

# Everything that the trace runs through or that shapes what is stored. Operators are opaque to the trace, so backends
# and kernels do not count, but what puts kernels in the place of layers does.
_TRACED = ("models/decoder.py", "layers/*.py", "kernels/install.py", "kernels/*_op.py", "compilation/*.py")


def source_factors() -> dict[str, str]:
    """Digest of the content of every traced source file of ours, by path below the package."""
    root = Path(server.__file__).parent
    factors = {}
    for pattern in _TRACED:
        for path in sorted(root.glob(pattern)):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            factors[f"source server/{path.relative_to(root).as_posix()}"] = digest
    return factors


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def cpp_compiler() -> str | None:
    """Path of the C++ compiler that Inductor will use on CPU, None when there is none.

    Inductor tries $CXX, else g++ (`torch._inductor.config.cpp.cxx`).
    """
    return shutil.which(os.environ.get("CXX", "g++"))


def cpp_compiler_factor() -> str:
    """Path and version of the C++ compiler: both are part of the names under which Inductor keeps its objects."""
    compiler = cpp_compiler()
    if compiler is None:
        return "none"
    try:
        output = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return compiler
    return f"{os.environ.get('CXX', 'g++')} {output.splitlines()[0] if output else ''}".strip()


def device_factors(device_type: str, index: int = 0) -> dict[str, str]:
    """Kind of GPU, or instruction set, threads and compiler of the CPU. Imports torch."""
    import torch

    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(index)
        return {
            "device": f"{properties.name} sm_{properties.major}{properties.minor}",
            "device.multiprocessors": str(properties.multi_processor_count),
            "cuda": str(torch.version.cuda),
        }
    return {
        "device": f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "cpu.flags": _cpu_flags_digest(),
        "cpu.threads": str(torch.get_num_threads()),
        "cpu.compiler": cpp_compiler_factor(),
    }


def _cpu_flags_digest() -> str:
    """Digest of the instruction-set flags: compiled with -march=native, an object runs only where all are there."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = ""
    return hashlib.sha256(" ".join(sorted(flags.partition(":")[2].split())).encode()).hexdigest()[:16]


def model_factors(config: ModelConfig) -> dict[str, str]:
    """Every field of the model's configuration that its forward pass depends on."""
    ignored = {"bos_token_id", "eos_token_ids", "dtype"}
    flat: dict[str, str] = {}
    for name, value in msgspec.to_builtins(config).items():
        if name in ignored:
            continue
        if isinstance(value, Mapping):
            flat.update({f"model.{name}.{inner}": str(v) for inner, v in value.items()})
        else:
            flat[f"model.{name}"] = str(value)
    return flat


def collect(
    config: ModelConfig,
    *,
    device_type: str,
    device_index: int = 0,
    dtype: Any,
    max_positions: int,
    token_budget: int,
    custom_ops: str,
) -> dict[str, str]:
    """All factors. `dtype` is the torch dtype of weights and activations, `max_positions` the rows of the rotary
    table, `token_budget` the largest batch in tokens, which the kernels are tuned for, `custom_ops` `--custom-ops`."""
    return {
        "format": FORMAT,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        **device_factors(device_type, device_index),
        **model_factors(config),
        "dtype": str(dtype).removeprefix("torch."),
        "max_positions": str(max_positions),
        "token_budget": str(token_budget),
        "custom_ops": custom_ops,
        **source_factors(),
    }


def cache_key(factors: Mapping[str, str]) -> str:
    """Name of the entry: 32 hex digits."""
    return hashlib.sha256(msgspec.json.encode(dict(factors), order="sorted")).hexdigest()[:32]


def explain(factors: Mapping[str, str], entries: Sequence[Any]) -> list[str]:
    """Why the cache has no entry for `factors`, in lines: what differs from the entry that is nearest to it.

    `entries` are `EntryInfo`s, newest first; the nearest is the one with the fewest differing factors.
    """
    key = cache_key(factors)
    if any(entry.key == key for entry in entries):
        return [f"hit: entry {key}"]
    readable = [entry for entry in entries if entry.factors]
    if not readable:
        return [f"miss: the cache is empty; entry {key} will be compiled"]
    nearest = min(readable, key=lambda entry: len(_differences(factors, entry.factors)))
    differences = _differences(factors, nearest.factors)
    lines = [f"miss: entry {key} will be compiled; {len(differences)} factor(s) differ from the nearest, {nearest.key}"]
    absent = "(absent)"
    return lines + [f"  {n}: {nearest.factors.get(n, absent)} -> {factors.get(n, absent)}" for n in differences]


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
