"""Starts a server again and again, each time in fresh processes, with empty or with filled compiler caches."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchctl.provenance import collect_provenance
from benchctl.targets import RunningServer, launch
from reports.schema import CellConfig, CellResult, ServerInfo, StartupReport, config_digest
from server.errors import UserError

Kind = Literal["cold", "warm"]
Launch = Callable[..., RunningServer]
OnStart = Callable[[Kind, int, int], None]
"""Called before a start with its kind, its number from 1 on (0: it only fills the caches) and their total."""


@dataclass(slots=True)
class Starts:
    """What was measured of one configuration."""

    config: CellConfig
    reports: list[StartupReport] = field(default_factory=list)
    server: ServerInfo | None = None


def measure_starts(
    config: CellConfig,
    kinds: Sequence[Kind],
    repeats: int,
    *,
    log_dir: Path,
    on_start: OnStart,
    timeout_s: float,
    launch: Launch = launch,
) -> Starts:
    """`repeats` starts of each of `kinds`, the cold ones first.

    Cold: benchctl's, Inductor's and the kernels' caches are empty directories. Warm: they are what an earlier start of
    this call left; without a cold one before, a start that is not reported fills them. Every server is stopped again.

    Raises `TargetError` for a server that cannot start.
    """
    starts = Starts(config)
    with _private_directory() as caches:
        for kind in kinds:
            if kind == "warm" and not starts.reports:
                on_start(kind, 0, repeats)
                launch(config, log_dir=log_dir, cold_caches=caches, timeout_s=timeout_s, log_name="fill.log").stop()
            for number in range(1, repeats + 1):
                if kind == "cold":
                    shutil.rmtree(caches, ignore_errors=True)
                    caches.mkdir(mode=0o700)
                on_start(kind, number, repeats)
                name = f"{kind}-{number}.log"
                with launch(config, log_dir=log_dir, cold_caches=caches, timeout_s=timeout_s, log_name=name) as server:
                    if server.startup is not None:
                        server.startup.kind = kind  # eager fills no cache of ours, yet its second start is a warm one
                        starts.reports.append(server.startup)
                    starts.server = server.info
    return starts


class _private_directory:
    """A temporary directory that may be removed and made again while in use."""

    def __enter__(self) -> Path:
        try:
            self._path = Path(tempfile.mkdtemp(prefix="benchctl-caches-"))
        except OSError as error:
            raise UserError(f"no room for compiler caches: {error.strerror}; point TMPDIR elsewhere") from error
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def start_config(model: str, mode: str, attention_backend: str, server_args: dict[str, object]) -> CellConfig:
    """The configuration of a server that is only started: it has no load."""
    return CellConfig(
        model=model,
        mode=mode,
        attention_backend=attention_backend,
        server_args=server_args,
        workload={"name": "first-token"},
        arrival={"name": "once"},
    )


def as_result(starts: Starts) -> CellResult:
    """The starts as a result that `benchctl report` renders: a cell without a load."""
    config = starts.config
    backend = (starts.server and starts.server.attention_backend) or config.attention_backend
    return CellResult(
        cell_id=f"{config.engine}/{config.model}/{config.mode}/{backend}",
        config=config,
        config_digest=config_digest(config),
        status="ok",
        startup=starts.reports,
        server=starts.server,
        provenance=collect_provenance(),
    )


def parse_arguments(arguments: Sequence[str]) -> dict[str, object]:
    """`["--max-model-len", "512", "--no-enable-prefix-caching"]` as `{"max_model_len": "512", "enable_...": False}`.

    Raises UserError for an argument without a flag before it.
    """
    parsed: dict[str, object] = {}
    waiting: str | None = None
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            key = name.replace("-", "_")
            waiting = None if equals else key
            if equals:
                parsed[key] = value
            elif key.startswith("no_"):
                parsed[key[3:]], waiting = False, None
            else:
                parsed[key] = True
        elif waiting is not None:
            parsed[waiting], waiting = argument, None
        else:
            raise UserError(f"{argument!r}: belongs to no option; options of `benchctl serve` follow `--`")
    return parsed
