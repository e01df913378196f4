"""What must be equal before two results may be compared: the traffic, the model and the machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from benchctl.loadgen.options import LoadOptions
from reports.schema import CellResult
from server.errors import UserError
from workloads.parameters import near_matches


class IncomparableError(UserError):
    """Results of different experiments; exit code 3."""

    exit_code = 3


def _gpus(result: CellResult) -> list[Any]:
    return [gpu.get("name") for gpu in result.provenance.gpus]


def _client(name: str) -> Callable[[CellResult], Any]:
    """An option of the load generator that changes what is counted, or what a time means."""
    usual = getattr(LoadOptions(url="", model=""), name)
    return lambda r: r.config.client.get(name, usual)


FIELDS: dict[str, Callable[[CellResult], Any]] = {
    "model": lambda r: r.config.model,
    "workload": lambda r: r.workload.digest if r.workload else None,
    "schedule": lambda r: r.workload.schedule_digest if r.workload else None,
    "arrival": lambda r: r.config.arrival,
    "endpoint": lambda r: r.config.endpoint,
    "forced_lengths": lambda r: r.workload.forced_lengths if r.workload else None,
    "output_token_source": lambda r: r.metrics.output_token_source if r.metrics else None,
    "warmup": _client("warmup"),
    "cooldown": _client("cooldown"),
    "retries": _client("retries"),
    "continuous_usage": _client("continuous_usage"),
    # Goodput is of the first; without one there is none to compare.
    "slo": lambda r: r.config.slos[0] if r.config.slos else None,
    "gpu": _gpus,
    "cpu": lambda r: r.provenance.cpu,
    "cpu_count": lambda r: r.provenance.cpu_count,
}
"""Name (as `--ignore-field` takes it) -> the value that must be the same. Mode, backend, engine and server flags are
not here: they are what people compare."""


def check_ignored(names: Iterable[str]) -> frozenset[str]:
    """The names as a set. Raises UserError for one that is no field."""
    chosen = frozenset(names)
    for name in sorted(chosen - FIELDS.keys()):
        raise UserError(f"--ignore-field {name!r}: no such field; {near_matches(name, FIELDS)}")
    return chosen


def differences(one: CellResult, other: CellResult, ignore: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Field -> the two values, for every field that differs and is known on both sides."""
    found = {}
    for name, read in FIELDS.items():
        values = read(one), read(other)
        if name not in ignore and None not in values and values[0] != values[1]:
            found[name] = values
    return found


def require_comparable(one: CellResult, other: CellResult, ignore: Collection[str], *, where: str) -> None:
    """Raise IncomparableError that names the first differing fields, their values and the way to overrule them."""
    found = differences(one, other, ignore)
    if found:
        parts = [f"{name} ({_short(values[0])} against {_short(values[1])})" for name, values in found.items()]
        flags = " ".join(f"--ignore-field {name}" for name in found)
        raise IncomparableError(f"{where}: not comparable, different {', '.join(parts)}; overrule with {flags}")


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 and text.isalnum() else text
