"""A whole GPU worker without its process: started as the server starts it, driven step by step."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from server.config import (
    AttentionOptions,
    BackendName,
    CacheOptions,
    CompilationOptions,
    CudaGraphMode,
    Mode,
    ModelOptions,
    SchedulerOptions,
    ServerConfig,
)
from server.ipc.engine_to_worker import ScheduleStep
from server.timeline import Timeline
from server.worker.worker import Worker


class StandInChild:
    """Takes the place of the link to the supervisor."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.timeline = Timeline("worker-0")

    def flush_spans(self) -> None:
        pass

    def progress(self, name: str, done: float, total: float, unit: str = "") -> None:
        pass

    def send(self, message: Any) -> None:
        raise AssertionError(f"unexpected message {message}")


def forget(worker: Worker, names: list[str]) -> None:
    """Drop requests from the worker's batch."""
    worker.runner.execute(ScheduleStep(10**6, [], {}, {}, names))


def start_worker(
    model: str,
    *,
    mode: Mode,
    backend: BackendName,
    cache_dir: str,
    cudagraph_mode: CudaGraphMode = "full_and_piecewise",
    custom_ops: str = "auto",
    dtype: str = "bfloat16",
    device: str = "cuda",
    load_format: str = "dummy",
) -> Worker:
    """Ready to run steps: compiled, captured, warm."""
    config = ServerConfig(
        model=ModelOptions(model=model, dtype=dtype, load_format=load_format),  # type: ignore[arg-type]
        cache=CacheOptions(num_gpu_blocks_override=96),
        scheduler=SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=512),
        compilation=CompilationOptions(
            mode=mode,
            cudagraph_mode=cudagraph_mode,
            cudagraph_capture_sizes=(1, 4, 16, 64),
            custom_ops=custom_ops,  # type: ignore[arg-type]
            cache_dir=cache_dir,
        ),
        attention=AttentionOptions(backend=backend),
        device=device,  # type: ignore[arg-type]
        runtime_dir=tempfile.mkdtemp(dir=cache_dir),
    )
    torch._dynamo.reset()
    worker = Worker(StandInChild(config))  # type: ignore[arg-type]
    worker.start()
    return worker
