"""From a suite to cells: which servers are started, and what is replayed against each."""

from __future__ import annotations

import fnmatch
import hashlib
from typing import Any

import msgspec

from benchctl.matrix.suite import Load, Suite
from reports.schema import CellConfig, ReferenceFigure, config_digest
from server.errors import UserError


class Cell(msgspec.Struct, kw_only=True, frozen=True):
    """One experiment of a matrix."""

    id: str
    config: CellConfig
    digest: str


class ServerPlan(msgspec.Struct, kw_only=True, frozen=True):
    """A distinct server and the cells that run against it, in order."""

    name: str
    """Readable and unique within the matrix, e.g. `benchctl/tiny/eager/TORCH_SDPA`."""
    cells: list[Cell]

    @property
    def config(self) -> CellConfig:
        """Of any of its cells: they share everything that a launch looks at."""
        return self.cells[0].config


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    suite: Suite
    digest: str
    servers: list[ServerPlan]
    reference: list[ReferenceFigure]

    @property
    def cells(self) -> list[Cell]:
        return [cell for server in self.servers for cell in server.cells]


def plan_matrix(suite: Suite) -> Plan:
    """All cells of a suite, grouped by server. Pure: nothing is built or started.

    Raises UserError: no load for any model, the same cell twice, or patterns in `only` that no cell matches.
    """
    servers = []
    for engine in suite.engines:
        for model in suite.models:
            loads = [load for load in suite.loads if load.models is None or model in load.models]
            if not loads:
                continue
            # An endpoint is as somebody else started it: modes and backends are not ours to choose.
            variants: list[tuple[str | None, str | None]] = (
                [(None, None)] if engine == "url" else [(mode, name) for name in suite.backends for mode in suite.modes]
            )
            for mode, backend in variants:
                name = "/".join(part for part in (engine, model, mode, backend) if part)
                config = CellConfig(
                    engine=engine,
                    model=model,
                    mode=mode,
                    attention_backend=backend,
                    server_args={} if engine == "url" else dict(suite.server),
                    url=suite.url if engine == "url" else None,
                    workload={},
                    arrival={},
                    seed=suite.seed,
                    client=suite.client,
                )
                servers.append(ServerPlan(name=name, cells=_cells(name, config, loads)))
    if not servers:
        raise UserError(f"suite {suite.name}: no load is meant for any of the models {', '.join(suite.models)}")
    servers = _select(servers, suite)
    return Plan(
        suite=suite,
        digest=hashlib.sha256(msgspec.json.encode(suite, order="deterministic")).hexdigest(),
        servers=servers,
        reference=_reference(suite, {cell.id for server in servers for cell in server.cells}),
    )


def _select(servers: list[ServerPlan], suite: Suite) -> list[ServerPlan]:
    """The cells that match a pattern of `only`, and their servers."""
    if not suite.only:
        return servers
    selected = []
    for server in servers:
        cells = [cell for cell in server.cells if any(fnmatch.fnmatchcase(cell.id, pattern) for pattern in suite.only)]
        if cells:
            selected.append(ServerPlan(name=server.name, cells=cells))
    if not selected:
        raise UserError(f"suite {suite.name}: only = {suite.only} matches no cell; `--plan` without it shows their ids")
    return selected


def traffic_seed(suite_seed: int, traffic: str) -> int:
    """Seed of the cells that replay `traffic` (load and arrival, e.g. `sharegpt-like/rate-4`), 32 bits.

    Every server gets the same requests for the same traffic, but no request twice: prompts of an earlier cell would
    be found in the prefix cache.
    """
    return int(hashlib.sha256(f"{suite_seed}/{traffic}".encode()).hexdigest()[:8], 16)


def arrival_label(arrival: dict[str, Any]) -> str:
    """A short name of an arrival process: `rate-4`, `concurrency-8`, `burst`, `gamma-rate-4-burstiness-0.5`."""
    name = str(arrival.get("name", "arrival"))
    details = {key: value for key, value in arrival.items() if key not in ("name", "duration_s", "exact_rate")}
    parts = [] if name in ("poisson", "concurrency") else [name]
    for key, value in details.items():
        parts.append(f"{key}-{value:g}" if isinstance(value, int | float) else f"{key}-{_short(value)}")
    return "-".join(parts) or name


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:6]


def _cells(server_name: str, base: CellConfig, loads: list[Load]) -> list[Cell]:
    from benchctl.loadgen.session import sized_workload  # it imports this module

    cells: list[Cell] = []
    taken: set[str] = set()
    for load in loads:
        for arrival in load.arrivals:
            traffic = f"{load.label or load.workload['name']}/{arrival_label(arrival)}"
            config = msgspec.structs.replace(
                base,
                workload=sized_workload(load.workload, arrival),
                arrival=arrival,
                endpoint=load.endpoint,
                seed=traffic_seed(base.seed, traffic),
                slos=load.slos,
            )
            name = f"{server_name}/{traffic}"
            digest = config_digest(config)
            if name in taken:
                name = f"{name}-{digest[:8]}"
            if name in taken:
                raise UserError(f"cell {name} is in the suite twice")
            taken.add(name)
            cells.append(Cell(id=name, config=config, digest=digest))
    return cells


def _reference(suite: Suite, planned: set[str]) -> list[ReferenceFigure]:
    """Figures for the cells that are run; the rest of the table is of no use to this report."""
    if suite.reference is None:
        return []
    return [
        ReferenceFigure(
            cell_id=row.cell,
            source=suite.reference.source,
            metric=row.metric,
            value=row.value,
            limit=row.limit,
            target=row.target,
        )
        for row in suite.reference.rows
        if row.cell in planned
    ]
