"""An installed SGLang, started as `python -m sglang.launch_server`."""

from __future__ import annotations

import importlib.util
import sys

from benchctl.targets.base import UnsupportedTarget, flag_arguments
from benchctl.targets.installed import InstalledTarget
from reports.schema import CellConfig

# Our (and vLLM's) name of a setting -> SGLang's.
_FLAGS = {
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "block_size": "page_size",
    "dtype": "dtype",
    "device": "device",
    "load_format": "load_format",
    "gpu_memory_utilization": "mem_fraction_static",
    "seed": "random_seed",
    "served_model_name": "served_model_name",
}
_BACKENDS = {"FLASH_ATTN": "fa3", "TRITON_ATTN": "triton", "TORCH_SDPA": "torch_native"}


class SglangTarget(InstalledTarget):
    """Mode `compile` is SGLang's default (CUDA Graphs); `eager` switches the graphs off."""

    name = "sglang"

    def why_unavailable(self) -> str | None:
        return None if importlib.util.find_spec("sglang") else "sglang is not installed: no module `sglang`"

    def command(self, config: CellConfig, *, model: str, host: str, port: int) -> list[str]:
        argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--host", host]
        argv += ["--port", str(port)]
        arguments = dict(config.server_args)
        if arguments.pop("enable_prefix_caching", True) is False:
            argv.append("--disable-radix-cache")
        unknown = sorted(set(arguments) - set(_FLAGS))
        if unknown:
            raise UnsupportedTarget(f"no SGLang setting is known that equals {', '.join(unknown)}")
        mapped = {_FLAGS[key]: value for key, value in arguments.items()}
        mapped.setdefault("served_model_name", config.model)
        if config.mode == "eager":
            argv.append("--disable-cuda-graph")
        if config.attention_backend not in (None, "auto"):
            argv += ["--attention-backend", _BACKENDS[str(config.attention_backend)]]
        return argv + flag_arguments(mapped)
