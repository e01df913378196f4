"""What the launchers of installed rival engines share."""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from pathlib import Path

from benchctl.targets.base import (
    RunningServer,
    Target,
    TargetError,
    UnsupportedTarget,
    cache_environment,
    control_client,
    first_token_ns,
    get_json,
    server_info,
    start_kind,
    startup_report,
    wait_ready,
)
from benchctl.targets.process import ServerProcess
from reports.schema import CellConfig
from server.errors import UserError


class InstalledTarget(Target):
    """An engine that is installed beside us and started by its own command."""

    @abstractmethod
    def why_unavailable(self) -> str | None:
        """None if the engine is installed, else one line."""

    @abstractmethod
    def command(self, config: CellConfig, *, model: str, host: str, port: int) -> list[str]:
        """The engine's command line with settings equal to ours; raises `UnsupportedTarget` where none are."""

    def launch(
        self, config: CellConfig, *, log_path: Path, cold_caches: Path | None, timeout_s: float
    ) -> RunningServer:
        if reason := self.why_unavailable():
            raise UnsupportedTarget(reason)
        kind = start_kind(cold_caches)
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if cold_caches is not None:
            environment |= cache_environment(cold_caches)
        argv = self.command(config, model=_model_for_rival(config), host="127.0.0.1", port=port)
        process = ServerProcess(argv, log_path=log_path, env=environment)
        try:
            _, healthy_ns = wait_ready(
                process,
                lambda: url,
                timeout_s=timeout_s,
                explain_exit=lambda code: f"{self.name} exited with status {code} before it was ready",
            )
            with control_client(url) as client:
                token_ns = first_token_ns(client, config.model, timeout_s=timeout_s)
                info = server_info(get_json(client, "/version"))
        except TargetError as error:
            process.stop()
            error.log_tail = error.log_tail or process.log_tail()
            raise
        except BaseException:
            process.stop()
            raise
        info.mode, info.attention_backend = config.mode, config.attention_backend
        report = startup_report(kind=kind, exec_ns=process.exec_ns, healthy_ns=healthy_ns, token_ns=token_ns, server={})
        return RunningServer(url=url, model=config.model, process=process, startup=report, info=info)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _model_for_rival(config: CellConfig) -> str:
    """A folder or hub id that another engine can load.

    Our presets have no checkpoint on disk: a suite that compares engines names a folder with `config.json` (and
    `load_format = "dummy"`) or a hub id.
    """
    from server.config import ModelOptions
    from server.models.registry import PRESETS, resolve_model

    if config.model in PRESETS:
        raise UnsupportedTarget(
            f"preset {config.model!r} is built in and has no checkpoint that another engine can load; "
            "name a folder with config.json or a hub id in the suite"
        )
    if Path(config.model).expanduser().is_dir():
        return str(Path(config.model).expanduser().resolve())
    try:
        resolved = resolve_model(ModelOptions(model=config.model, load_format="dummy"))
    except UserError:
        return config.model
    return str(resolved.path)
