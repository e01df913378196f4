"""`benchctl serve`: run the bundled server."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from server import config as c
from server.errors import UserError
from server.timeline import Timeline, process_start_ns

if TYPE_CHECKING:
    from server.restart import Outcome
    from server.startup import StartupTimeline
    from server.supervisor import Observer

_MODEL = "Model"
_CACHE = "KV cache"
_SCHEDULER = "Scheduler"
_EXECUTION = "Execution"
_API = "API"
_MAX_API_SERVERS = 64


def serve(
    model: Annotated[
        str, typer.Argument(help="Preset, pulled model, folder with config.json, or hub id (see `benchctl models ls`).")
    ] = "smollm2-135m",
    *,
    # Model
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        typer.Option(help="`auto`: safetensors; dummy weights for a preset.", rich_help_panel=_MODEL),
    ] = "auto",
    dtype: Annotated[
        c.DtypeName, typer.Option(help="`auto`: float32 on CPU, the checkpoint's own on CUDA.", rich_help_panel=_MODEL)
    ] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Context length in tokens.", rich_help_panel=_MODEL)
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients use; default: MODEL.", rich_help_panel=_MODEL)
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of dummy weights and of unseeded requests.", rich_help_panel=_MODEL)
    ] = 0,
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja file to use instead of the checkpoint's.", rich_help_panel=_MODEL)
    ] = None,
    # KV cache
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens per block.", rich_help_panel=_CACHE)] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="Share of GPU memory for everything.", rich_help_panel=_CACHE)
    ] = 0.9,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(min=1, help="Exact number of KV blocks, on any device.", rich_help_panel=_CACHE)
    ] = None,
    cpu_kv_cache_gib: Annotated[
        float, typer.Option(min=0.001, help="Size of the KV cache on a CPU, GiB.", rich_help_panel=_CACHE)
    ] = 1.0,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse KV blocks of equal prefixes.", rich_help_panel=_CACHE)
    ] = True,
    # Scheduler
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Most requests in one step.", rich_help_panel=_SCHEDULER)
    ] = 256,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token budget of one step.", rich_help_panel=_SCHEDULER)
    ] = None,
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], typer.Option(help="Order of waiting requests.", rich_help_panel=_SCHEDULER)
    ] = "fcfs",
    async_scheduling: Annotated[
        bool, typer.Option(help="Schedule the next step while one runs.", rich_help_panel=_SCHEDULER)
    ] = True,
    long_prefill_token_threshold: Annotated[
        int,
        typer.Option(
            min=0, help="Most prompt tokens of one request per step; 0: no bound.", rich_help_panel=_SCHEDULER
        ),
    ] = 0,
    max_mixed_prefill_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most prompt tokens of a step in which others generate.", rich_help_panel=_SCHEDULER),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Waiting requests before 429; 0: no bound.", rich_help_panel=_SCHEDULER)
    ] = 4096,
    # Execution
    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        typer.Option(help="`auto`: CUDA where there is one.", rich_help_panel=_EXECUTION),
    ] = "auto",
    mode: Annotated[c.Mode, typer.Option(help="How the model runs.", rich_help_panel=_EXECUTION)] = "compile",
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="vLLM's spelling of `--mode eager`.", rich_help_panel=_EXECUTION)
    ] = False,
    attention_backend: Annotated[
        c.BackendName, typer.Option(help="Attention over the paged cache.", rich_help_panel=_EXECUTION)
    ] = "auto",
    flash_decode: Annotated[
        Literal["native", "split"],
        typer.Option(help="FLASH_ATTN: few long decodes on the split-KV kernel?", rich_help_panel=_EXECUTION),
    ] = "split",
    custom_ops: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(
            help="Kernels of our own on CUDA; `auto`: what Inductor makes, it makes.", rich_help_panel=_EXECUTION
        ),
    ] = "auto",
    cudagraph_mode: Annotated[
        c.CudaGraphMode, typer.Option(help="CUDA Graphs in compile mode.", rich_help_panel=_EXECUTION)
    ] = "full_and_piecewise",
    cudagraph_capture_sizes: Annotated[
        str | None, typer.Option(help="Batch sizes to capture, e.g. 1,2,4,8.", rich_help_panel=_EXECUTION)
    ] = None,
    compilation_cache_dir: Annotated[
        str | None, typer.Option(help="Where compiled graphs are kept.", rich_help_panel=_EXECUTION)
    ] = None,
    explain_cache: Annotated[
        bool,
        typer.Option(
            "--explain-cache", help="Say what the compile cache would do, and exit.", rich_help_panel=_EXECUTION
        ),
    ] = False,
    # API
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_API)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.", rich_help_panel=_API)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="BENCHCTL_API_KEY", help="Clients must send this bearer token.", rich_help_panel=_API),
    ] = None,
    api_server_count: Annotated[
        str,
        typer.Option(
            metavar="auto|INTEGER",
            help="API processes that share the port, 1 to 64; `auto`: 4 with 16 usable cores or more, else 1.",
            rich_help_panel=_API,
        ),
    ] = "auto",
    shutdown_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds for requests in flight at SIGTERM.", rich_help_panel=_API)
    ] = 10.0,
    restart: Annotated[
        Literal["no", "on-failure"],
        typer.Option(
            help="on-failure: start again when a server that was ready dies, after 1, 2, 4 ... 60 s.",
            rich_help_panel=_API,
        ),
    ] = "no",
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Format of stderr.", rich_help_panel=_API)
    ] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Least severity to log.", rich_help_panel=_API)
    ] = "info",
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Profile some steps in all processes; a Chrome trace is there when the server stops.",
            rich_help_panel=_EXECUTION,
        ),
    ] = None,
    profile_skip: Annotated[
        int, typer.Option(min=0, help="Steps after readiness before the profile.", rich_help_panel=_EXECUTION)
    ] = 20,
    profile_steps: Annotated[int, typer.Option(min=1, help="Steps to profile.", rich_help_panel=_EXECUTION)] = 50,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Write {url, port, pid} here as JSON once the model answers.", rich_help_panel=_API),
    ] = None,
    startup_json: Annotated[
        Path | None, typer.Option(help="Write the start-up timeline here.", rich_help_panel=_API)
    ] = None,
    startup_trace: Annotated[
        Path | None, typer.Option(help="Write the start-up as a Chrome trace here.", rich_help_panel=_API)
    ] = None,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API until Ctrl-C or SIGTERM."""
    config = c.ServerConfig(
        model=c.ModelOptions(
            model=model,
            load_format=load_format,
            dtype=dtype,
            max_model_len=max_model_len,
            served_model_name=served_model_name,
            seed=seed,
            chat_template=chat_template,
        ),
        cache=c.CacheOptions(
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
            num_gpu_blocks_override=num_gpu_blocks_override,
            cpu_kv_cache_gib=cpu_kv_cache_gib,
            enable_prefix_caching=enable_prefix_caching,
        ),
        scheduler=c.SchedulerOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=scheduling_policy,
            async_scheduling=async_scheduling,
            long_prefill_token_threshold=long_prefill_token_threshold,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            max_queue=max_queue,
        ),
        compilation=c.CompilationOptions(
            mode="eager" if enforce_eager else mode,
            cudagraph_mode=cudagraph_mode,
            cudagraph_capture_sizes=_parse_sizes(cudagraph_capture_sizes),
            custom_ops=custom_ops,
            cache_dir=compilation_cache_dir,
        ),
        attention=c.AttentionOptions(backend=attention_backend, flash_decode=flash_decode),
        api=c.ApiOptions(
            host=host,
            port=port,
            api_key=api_key,
            shutdown_timeout_s=shutdown_timeout,
            api_server_count=_parse_api_server_count(api_server_count),
            log_format=log_format,
            log_level=log_level,
        ),
        profile=c.ProfileOptions(
            directory=str(profile.absolute()) if profile is not None else None, skip=profile_skip, steps=profile_steps
        ),
        device=device,
        exec_time_ns=process_start_ns(),
    )
    _ensure_model(model)
    if explain_cache:
        from server.compilation import explain_cache as explain

        for line in explain(config):
            typer.echo(line)
        return
    if config.profile.directory is not None:
        from server.profiling import check_directory

        check_directory(config.profile.directory)
    files = _ReadyFiles(ready_file, startup_json, startup_trace)
    files.check()
    if restart == "no":
        raise typer.Exit(_run(config, files).exit_code)
    raise typer.Exit(_run_again_on_failure(config, files))


@dataclass(frozen=True)
class _ReadyFiles:
    """What is written once the model answers."""

    ready_file: Path | None
    startup_json: Path | None
    startup_trace: Path | None

    def check(self) -> None:
        """Raise UserError for what could not be written, before a start that takes long."""
        for path in (self.ready_file, self.startup_json, self.startup_trace):
            if path is not None and not os.access(path.parent, os.W_OK | os.X_OK):
                raise UserError(f"cannot write {path}: {path.parent} is no writable directory")

    def write(self, url: str, timeline: StartupTimeline) -> None:
        import msgspec

        from server.startup import chrome_trace

        if self.startup_json is not None:
            _write_atomically(self.startup_json, msgspec.json.encode(timeline))
        if self.startup_trace is not None:
            _write_atomically(self.startup_trace, json.dumps(chrome_trace(timeline)).encode())
        if self.ready_file is not None:
            ready = {"url": url, "port": _port_of(url), "pid": os.getpid()}
            _write_atomically(self.ready_file, json.dumps(ready).encode())


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def _observer(config: c.ServerConfig) -> Observer:
    from benchctl.serve_display import ConsoleObserver, JsonObserver

    return JsonObserver() if config.api.log_format == "json" else ConsoleObserver()


def _run(config: c.ServerConfig, files: _ReadyFiles) -> Outcome:
    """One server from start to end."""
    from server.restart import Outcome
    from server.startup import join_timeline
    from server.supervisor import Supervisor

    timeline = Timeline("supervisor")
    timeline.add("imports", config.exec_time_ns, time.monotonic_ns())
    observer = _observer(config)
    supervisor = Supervisor(config, observer, timeline)

    def on_ready(url: str) -> None:
        # Who asked for any free port finds a restarted server where the first one was.
        config.api.port = _port_of(url)
        files.write(url, join_timeline(timeline.spans, config.exec_time_ns, time.monotonic_ns()))

    try:
        code = supervisor.run(on_ready)
    finally:
        observer.close()
        if config.profile.directory is not None:
            _finish_profile(config.profile)
    return Outcome(code, None if supervisor.ready_at is None else time.monotonic() - supervisor.ready_at)


def _finish_profile(options: c.ProfileOptions) -> None:
    from server.profiling import merge

    assert options.directory is not None
    trace = merge(options.directory)
    if trace is None:
        typer.echo(f"no profile: the server ran fewer than {options.skip + options.steps + 1} steps", err=True)
    else:
        typer.echo(f"profile: {trace}", err=True)


def _run_again_on_failure(config: c.ServerConfig, files: _ReadyFiles) -> int:
    from server.restart import run_with_restarts

    def announce(pause_s: float) -> None:
        _observer(config).on_restart(pause_s)

    runs = itertools.count()

    def run() -> Outcome:
        if next(runs):
            config.exec_time_ns = time.monotonic_ns()  # the start-up of another server begins when it is due
        return _run(config, files)

    return run_with_restarts(run, announce)


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose a writable path") from error


def _parse_sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise UserError(f"--cudagraph-capture-sizes {text!r}: give positive integers with commas, e.g. 1,2,4,8")
    return sizes


def _parse_api_server_count(text: str) -> int | None:
    """None: as many as the supervisor finds right."""
    if text == "auto":
        return None
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= _MAX_API_SERVERS:
        raise UserError(f"--api-server-count {text!r}: give auto, or a number from 1 to {_MAX_API_SERVERS}")
    return count


def _ensure_model(model: str) -> None:
    """Pull a model that we know how to get and do not have yet, before any process starts."""
    from server.models.registry import must_be_pulled

    if must_be_pulled(model):
        from server.models.pull import pull

        typer.echo(f"{model} is not here yet: pulling it (once)", err=True)
        pull(model)


def register(app: typer.Typer) -> None:
    app.command(name="serve")(serve)
