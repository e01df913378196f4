"""The bundled server, as `python -m benchctl serve` in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from benchctl.targets.base import (
    RunningServer,
    Target,
    TargetError,
    UnsupportedTarget,
    cache_environment,
    control_client,
    first_token_ns,
    flag_arguments,
    get_json,
    server_info,
    start_kind,
    startup_report,
    wait_ready,
)
from benchctl.targets.process import ServerProcess
from reports.schema import CellConfig

_USER_ERROR_EXIT = 2
_MARK = "benchctl: "


def serve_command(config: CellConfig, *, ready_file: Path, cold_caches: Path | None) -> list[str]:
    """The command line that serves `config`."""
    argv = [sys.executable, "-m", "benchctl", "serve", config.model, "--port", "0", "--ready-file", str(ready_file)]
    if config.mode is not None:
        argv += ["--mode", config.mode]
    if config.attention_backend is not None:
        argv += ["--attention-backend", config.attention_backend]
    if cold_caches is not None:
        argv += ["--compilation-cache-dir", str(cold_caches / "benchctl")]
    return argv + flag_arguments(config.server_args)


class BundledTarget(Target):
    name = "benchctl"

    def launch(
        self, config: CellConfig, *, log_path: Path, cold_caches: Path | None, timeout_s: float
    ) -> RunningServer:
        kind = start_kind(cold_caches)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.pop("BENCHCTL_API_KEY", None)  # the measured server is open to this machine, and to nobody else
        if cold_caches is not None:
            environment |= cache_environment(cold_caches)
        with tempfile.TemporaryDirectory(prefix="benchctl-") as folder:
            ready_file = Path(folder) / "ready.json"
            argv = serve_command(config, ready_file=ready_file, cold_caches=cold_caches)
            process = ServerProcess(argv, log_path=log_path, env=environment)

            def find_url() -> str | None:
                return str(json.loads(ready_file.read_bytes())["url"]) if ready_file.exists() else None

            try:
                url, healthy_ns = wait_ready(
                    process, find_url, timeout_s=timeout_s, explain_exit=lambda code: _explain_exit(process, code)
                )
                with control_client(url) as client:
                    model = str(config.server_args.get("served_model_name") or config.model)
                    token_ns = first_token_ns(client, model, timeout_s=timeout_s)
                    timeline = get_json(client, "/v1/startup")
                    info = server_info(get_json(client, "/version"))
            except TargetError as error:
                process.stop()
                error.log_tail = error.log_tail or process.log_tail()
                raise
            except BaseException:
                process.stop()
                raise
        report = startup_report(
            kind=kind, exec_ns=process.exec_ns, healthy_ns=healthy_ns, token_ns=token_ns, server=timeline
        )
        return RunningServer(url=url, model=model, process=process, startup=report, info=info)


def _explain_exit(process: ServerProcess, code: int) -> str:
    """Why the server exited; raises `UnsupportedTarget` when it said itself that the configuration cannot run."""
    said = [line[len(_MARK) :] for line in process.log_tail() if line.startswith(_MARK)]
    if code == _USER_ERROR_EXIT and said:
        raise UnsupportedTarget(said[-1], process.log_tail())
    if said:
        return f"the server exited with status {code}: {said[-1]}"
    return f"the server exited with status {code} before it was ready"
