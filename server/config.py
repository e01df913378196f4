"""Configuration of the bundled server, shared by its processes.

The supervisor fills one `ServerConfig` from the command line and hands it to every child as JSON; a child never
reads command-line flags or environment variables of its own. Fields carry vLLM's flag names where those exist.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Mode = Literal["compile", "eager"]
BackendName = Literal["auto", "FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
CudaGraphMode = Literal["none", "piecewise", "full", "full_and_piecewise"]


class ModelOptions(msgspec.Struct, kw_only=True):
    """Which model to serve and how to load it."""

    model: str = "tiny"
    """Preset name, name of a pulled model, folder with `config.json`, or hub id (see `server.models.registry`)."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """`auto`: safetensors, except for a preset, which has no weights and is filled with dummies."""
    dtype: DtypeName = "auto"
    """`auto`: float32 on CPU, the checkpoint's own (bfloat16 for presets) on CUDA."""
    max_model_len: int | None = None
    """Context length in tokens; None: the model's `max_position_embeddings`."""
    served_model_name: str | None = None
    seed: int = 0
    """Seed of dummy weights and of requests that bring none."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the checkpoint's chat template."""


class CacheOptions(msgspec.Struct, kw_only=True):
    """The paged KV cache."""

    block_size: int | None = None
    """Tokens per block; None: the attention backend's preferred size."""
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    cpu_kv_cache_gib: float = 1.0
    """Size of the KV cache on a CPU device, GiB, when the number of blocks is not overridden."""
    enable_prefix_caching: bool = True


class SchedulerOptions(msgspec.Struct, kw_only=True):
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    """Token budget of one step; None: 8192 on CUDA, 512 on CPU."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = True
    """Schedule step N+1 while the worker runs step N."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens one request may get in one step while others run; 0: only the budget bounds it."""
    max_mixed_prefill_tokens: int | None = None
    """Most prompt tokens of a step in which a request generates; None: 2048 on CUDA, only the budget on CPU."""
    max_queue: int = 4096
    """Requests waiting in the engine before the API answers 429; 0: no bound."""


class CompilationOptions(msgspec.Struct, kw_only=True):
    mode: Mode = "compile"
    cudagraph_mode: CudaGraphMode = "full_and_piecewise"
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    custom_ops: Literal["auto", "on", "off"] = "auto"
    """Hand-written kernels on CUDA. auto: all of them in eager mode; when compiled those for projections and for rotary
    embedding with cache write, while Inductor makes the rest. on: when compiled also the norms. off: none."""
    cache_dir: str | None = None
    """Root of the on-disk caches; None: `benchctl_cache_dir()`."""


class AttentionOptions(msgspec.Struct, kw_only=True):
    backend: BackendName = "auto"
    flash_decode: Literal["native", "split"] = "split"
    """FLASH_ATTN only: let few long decodes go to the split-KV Triton kernel, or keep all on flash-attn."""


class ProfileOptions(msgspec.Struct, kw_only=True):
    directory: str | None = None
    """Where the Chrome trace of the profiled steps goes; None: no profile."""
    skip: int = 20
    """Steps after readiness that are not profiled."""
    steps: int = 50


class ApiOptions(msgspec.Struct, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    """0: the kernel picks a free port."""
    api_key: str | None = None
    shutdown_timeout_s: float = 10.0
    api_server_count: int | None = 1
    """Processes that share the port, at most 64; None: the supervisor chooses by the number of usable cores, and tells
    its children a number."""
    max_body_bytes: int = 16 * 1024 * 1024
    log_format: Literal["text", "json"] = "text"
    log_level: str = "info"


class ServerConfig(msgspec.Struct, kw_only=True):
    """Everything a server process needs to know."""

    model: ModelOptions = msgspec.field(default_factory=ModelOptions)
    cache: CacheOptions = msgspec.field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = msgspec.field(default_factory=SchedulerOptions)
    compilation: CompilationOptions = msgspec.field(default_factory=CompilationOptions)
    attention: AttentionOptions = msgspec.field(default_factory=AttentionOptions)
    api: ApiOptions = msgspec.field(default_factory=ApiOptions)
    profile: ProfileOptions = msgspec.field(default_factory=ProfileOptions)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    runtime_dir: str = ""
    """Private 0700 directory of this server: ipc sockets, `startup.json`. Set by the supervisor."""
    exec_time_ns: int = 0
    """CLOCK_MONOTONIC time at which the supervisor process was exec'ed; the start-up timeline's zero."""
