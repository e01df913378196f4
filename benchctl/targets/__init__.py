"""Targets: what a load is replayed against. Selection of the engine lives here."""

from __future__ import annotations

from pathlib import Path

from benchctl.targets.base import (
    START_TIMEOUT_S,
    RunningServer,
    Target,
    TargetError,
    TargetFailed,
    TargetTimeout,
    UnsupportedTarget,
    slug,
)
from benchctl.targets.bundled import BundledTarget
from benchctl.targets.sglang import SglangTarget
from benchctl.targets.url import UrlTarget
from benchctl.targets.vllm import VllmTarget
from reports.schema import CellConfig
from server.errors import UserError

__all__ = [
    "ENGINES",
    "RunningServer",
    "TargetError",
    "TargetFailed",
    "TargetTimeout",
    "UnsupportedTarget",
    "launch",
]

ENGINES: dict[str, Target] = {
    target.name: target for target in (BundledTarget(), UrlTarget(), VllmTarget(), SglangTarget())
}


def launch(
    config: CellConfig,
    *,
    log_dir: Path,
    cold_caches: Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
    log_name: str | None = None,
) -> RunningServer:
    """Bring up the server of a cell and wait until it has given its first token.

    `log_dir` takes the server's log (`log_name`, or a name made of the configuration). `cold_caches` roots the
    compiler caches: a missing or empty directory makes a cold start, one that an earlier launch filled a warm one;
    None leaves the user's caches in use and the kind of the start unknown. Call from the main thread.

    Raises `UnsupportedTarget` (the reason in one line), `TargetFailed` (with the log's tail), `TargetTimeout`, and
    UserError for an unknown engine.
    """
    target = ENGINES.get(config.engine)
    if target is None:
        raise UserError(f"engine {config.engine!r}: unknown; known are {', '.join(ENGINES)}")
    parts = [config.engine, config.model, config.mode, config.attention_backend]
    name = log_name or slug("-".join(part for part in parts if part)) + ".log"
    try:
        return target.launch(config, log_path=log_dir / name, cold_caches=cold_caches, timeout_s=timeout_s)
    except OSError as error:  # no room for the log, no such command, no more processes
        where = f"{error.filename}: " if error.filename else ""
        raise TargetFailed(f"the server could not be started: {where}{error.strerror or error}") from error
