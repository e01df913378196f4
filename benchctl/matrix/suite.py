"""Suites: named matrices in TOML. Read, overridden with `--set`, checked; every mistake is one line that names it."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from benchctl.gate.settings import GateSettings, check_settings
from server.errors import UserError
from workloads.parameters import convert, near_matches

StartKind = Literal["cold", "warm"]

CLIENT_OPTIONS = (
    *("workers", "timeout_s", "connect_timeout_s", "retries", "warmup", "cooldown"),
    *("lag_bound_s", "force_lengths", "continuous_usage", "tokenizer"),
)
"""Fields of `benchctl.loadgen.LoadOptions` that a suite may set."""


class Load(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A workload and the arrival processes that it is replayed under, one cell each."""

    workload: dict[str, Any]
    """Specification for `workloads.build_workload`, its name under "name"."""
    arrivals: list[dict[str, Any]]
    """Specifications for `workloads.arrivals.build_schedule`, each process under "name"; a list for `rate` or
    `concurrency` is a sweep: one cell per value."""
    label: str | None = None
    """Part of the cells' ids; default: the workload's name."""
    endpoint: Literal["completions", "chat"] = "completions"
    slos: list[str] = []
    models: list[str] | None = None
    """Only for these models of the suite; default: for all."""


class Reference(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A figure measured elsewhere, shown beside ours: a cell's id, a metric, and what it was."""

    cell: str
    metric: str
    value: float
    limit: float | None = None
    """The hardware's bound for this metric."""
    target: float | None = None


class ReferenceTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    source: str
    """What measured the figures, and on what."""
    rows: list[Reference] = []


class Suite(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A matrix: the product of engines, models, modes, backends and loads."""

    name: str = ""
    description: str = ""
    seed: int = 0
    engines: list[str] = msgspec.field(default_factory=lambda: ["benchctl"])
    models: list[str]
    modes: list[str] = msgspec.field(default_factory=lambda: ["compile", "eager"])
    backends: list[str] = msgspec.field(default_factory=lambda: ["auto"])
    url: str | None = None
    """For engine `url`."""
    server: dict[str, Any] = {}
    """Flags of `benchctl serve` for every server, with underscores, e.g. `max_model_len = 2048`."""
    client: dict[str, Any] = {}
    """How the load generator sends and counts: options of `benchctl run`, as `workers = 4` or `warmup = "5s"`."""
    loads: list[Load]
    starts: list[StartKind] = msgspec.field(default_factory=lambda: ["cold", "warm"])
    """Which starts are timed; the last one started serves the loads. Warm needs cold before it."""
    start_repeats: int = 1
    """Timed starts of each kind."""
    start_timeout_s: float = 900.0
    cell_timeout_s: float = 900.0
    only: list[str] = []
    """Shell patterns of cell ids; when given, cells that match none are left out."""
    reference: ReferenceTable | None = None
    gate: GateSettings = msgspec.field(default_factory=GateSettings)
    """What `benchctl gate` decides by."""


def shipped_suites() -> dict[str, str]:
    """Name -> first line of the description of every suite that comes with benchctl."""
    folder = resources.files("workloads") / "suites"
    names = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {name: load_suite(name).description.strip().split("\n")[0] for name in names}


def load_suite(name_or_file: str, assignments: Sequence[str] = ()) -> Suite:
    """Read a shipped suite by name or any suite by path, apply `--set` assignments, check it.

    Raises UserError: no such suite, broken TOML (line and column), unknown keys, values that cannot be.
    """
    where, text = suite_text(name_or_file)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        lines = text.split("\n")
        end = f"at line {len(lines)}, column {len(lines[-1]) + 1}, the end of the file"
        raise UserError(f"{where}: invalid TOML: {str(error).replace('at end of document', end)}") from None
    written_models = data["models"] if isinstance(data.get("models"), list) else []
    for assignment in assignments:
        _assign(data, assignment)
    for key in ("models", "loads"):
        if key not in data:
            raise UserError(f"{where}: `{key}` is missing")
    suite: Suite = convert(Suite, data, where=where)
    if not suite.name:
        suite.name = Path(name_or_file).stem
    _check(suite, where)
    # A load may be meant for a model that `--set models=...` left out.
    known_models = [*suite.models, *written_models]
    for number, load in enumerate(suite.loads):
        _check_names(load.models or [], known_models, f"{where}: loads[{number}]: model")
    return suite


def suite_text(name_or_file: str) -> tuple[str, str]:
    """(how messages refer to the suite, its TOML text). Raises UserError when there is no such suite."""
    path = Path(name_or_file).expanduser()
    looks_like_path = path.suffix == ".toml" or "/" in name_or_file
    if not looks_like_path:
        folder = resources.files("workloads") / "suites"
        shipped = [entry.name for entry in folder.iterdir()]
        if f"{name_or_file}.toml" in shipped:
            return f"suite {name_or_file}", (folder / f"{name_or_file}.toml").read_text(encoding="utf-8")
        if not path.is_file():
            names = [name.removesuffix(".toml") for name in shipped if name.endswith(".toml")]
            hint = near_matches(name_or_file, names)
            raise UserError(f"suite {name_or_file!r} is unknown; {hint} (or give a path that ends in .toml)")
    try:
        return str(path), path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"suite file {path}: {error.strerror}") from None


def _assign(data: dict[str, Any], assignment: str) -> None:
    """Apply `dotted.key=value`; the value is TOML where it parses, else text. Numbers in the key index lists."""
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"--set {assignment!r}: expected key=value, e.g. server.max_model_len=1024")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    target: Any = data
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(target, list):
            if not re.fullmatch(r"\d+", part) or int(part) >= len(target):
                below = ".".join(parts[:depth])
                raise UserError(f"--set {assignment!r}: `{below}` has entries 0 to {len(target) - 1}, not {part!r}")
            index: Any = int(part)
        elif isinstance(target, dict):
            index = part
            if not last:
                target.setdefault(index, {})
        else:
            raise UserError(f"--set {assignment!r}: `{'.'.join(parts[:depth])}` is a plain value")
        if last:
            target[index] = value
        else:
            target = target[index]


def _check(suite: Suite, where: str) -> None:
    from benchctl.targets import ENGINES

    for key in ("engines", "models", "modes", "backends", "loads", "starts"):
        values = getattr(suite, key)
        if not values:
            raise UserError(f"{where}: `{key}` is empty; nothing would run")
        if key != "loads" and len(set(values)) != len(values):
            raise UserError(f"{where}: `{key}` names an entry twice")
    _check_names(suite.engines, ENGINES, f"{where}: engine")
    _check_names(suite.modes, ("compile", "eager"), f"{where}: mode")
    _check_names(suite.backends, ("auto", "FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA"), f"{where}: attention backend")
    check_server_flags(suite.server, f"{where}: server")
    _check_client(suite, where)
    if suite.starts[0] == "warm":
        raise UserError(f'{where}: `starts`: a warm start needs a cold one before it: starts = ["cold", "warm"]')
    for key in ("start_repeats", "start_timeout_s", "cell_timeout_s"):
        if not 0 < getattr(suite, key) < float("inf"):
            raise UserError(f"{where}: `{key}` must be a finite number above 0, not {getattr(suite, key)}")
    check_settings(suite.gate, where)
    if "url" in suite.engines and not suite.url:
        raise UserError(f'{where}: engine "url" needs `url`, e.g. url = "http://127.0.0.1:8000"')
    for number, load in enumerate(suite.loads):
        at = f"{where}: loads[{number}]"
        if not isinstance(load.workload.get("name"), str):
            raise UserError(f"{at}: `workload.name` is missing")
        if not load.arrivals:
            raise UserError(f"{at}: `arrivals` is empty; nothing would run")
        load.arrivals = [swept for arrival in load.arrivals for swept in _sweep(arrival, at)]


def _check_names(names: Any, known: Any, what: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{what} {name!r} is unknown; {near_matches(str(name), known)}")


def _sweep(arrival: dict[str, Any], at: str) -> list[dict[str, Any]]:
    """One specification per value of a list under `rate` or `concurrency`; the specification itself without one."""
    lists = [key for key in ("rate", "concurrency") if isinstance(arrival.get(key), list)]
    if not lists:
        return [arrival]
    key = lists[0]
    values = arrival[key]
    if not values or len(set(map(str, values))) != len(values):
        raise UserError(f"{at}: arrival `{key}` = {values}: a sweep needs different values, at least one")
    return [{**arrival, key: value} for value in values]


def _check_client(suite: Suite, where: str) -> None:
    """Names and values of `[client]`, and every SLO."""
    from benchctl.loadgen.options import LoadOptions
    from benchctl.loadgen.run import check_options

    _check_names(suite.client, CLIENT_OPTIONS, f"{where}: client option")
    for slos in ([], *(load.slos for load in suite.loads)):
        try:
            options = msgspec.convert({"url": "", "model": "", "slos": slos, **suite.client}, LoadOptions)
            check_options(options)
        except (msgspec.ValidationError, UserError) as error:
            raise UserError(f"{where}: client: {error}" if not slos else f"{where}: {error}") from None


def check_server_flags(server: dict[str, Any], where: str) -> None:
    """Raise UserError for names, types and bounds that flags of `benchctl serve` do not have, and for flags that are
    the harness's own to set.
    """
    if not server:
        return
    from benchctl.commands.serve import serve

    ours = {"model", "mode", "enforce_eager", "attention_backend", "host", "port", "api_key", "ready_file"}
    ours |= {"compilation_cache_dir", "explain_cache", "startup_json", "startup_trace"}
    hints = get_type_hints(serve, include_extras=True)
    _check_names(server, set(inspect.signature(serve).parameters) - ours, f"{where} flag")
    for name, value in server.items():
        type_, *extras = get_args(hints[name])
        try:
            msgspec.convert(value, type_)
        except msgspec.ValidationError as error:
            raise UserError(f"{where}.{name} = {value!r}: {error}") from None
        low, high = (next((getattr(extra, side, None) for extra in extras), None) for side in ("min", "max"))
        if isinstance(value, int | float) and not (low or value) <= value <= (high or value):
            raise UserError(f"{where}.{name} = {value!r}: must be {_bounds(low, high)}")


def _bounds(low: float | None, high: float | None) -> str:
    parts = [f"at least {low:g}" if low is not None else "", f"at most {high:g}" if high is not None else ""]
    return " and ".join(part for part in parts if part)
