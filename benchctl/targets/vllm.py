"""An installed vLLM, started as `vllm serve`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchctl.targets.base import UnsupportedTarget, flag_arguments
from benchctl.targets.installed import InstalledTarget
from reports.schema import CellConfig

# Ours carry vLLM's names already; these are settings of our server alone, without an equal there.
_OWN_ONLY = (
    "cpu_kv_cache_gib",
    "shutdown_timeout",
    "max_queue",
    "max_mixed_prefill_tokens",
    "device",
    "flash_decode",
    "async_scheduling",
)


class VllmTarget(InstalledTarget):
    name = "vllm"

    def why_unavailable(self) -> str | None:
        return None if _executable() else "vllm is not installed: no `vllm` command beside this Python or on PATH"

    def command(self, config: CellConfig, *, model: str, host: str, port: int) -> list[str]:
        executable = _executable()
        assert executable is not None  # why_unavailable() was asked first
        argv = [executable, "serve", model, "--host", host, "--port", str(port)]
        arguments = {key: value for key, value in config.server_args.items() if key not in _OWN_ONLY}
        arguments.setdefault("served_model_name", config.model)
        if config.mode == "eager":
            argv.append("--enforce-eager")
        if config.attention_backend == "TORCH_SDPA":
            raise UnsupportedTarget("vllm has no TORCH_SDPA backend for text models")
        if config.attention_backend not in (None, "auto"):
            argv += ["--attention-backend", str(config.attention_backend)]
        return argv + flag_arguments(arguments)


def _executable() -> str | None:
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.is_file() else shutil.which("vllm")
