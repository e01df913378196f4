"""A GPU without memory: every way in which it is said is understood, and every part of a start names its own cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from server.config import CacheOptions, CompilationOptions, ModelOptions, SchedulerOptions, ServerConfig
from server.errors import UserError, device_out_of_memory, exhausted
from server.timeline import Timeline
from server.worker import device as device_module
from server.worker import kv_cache, worker
from server.worker.device import memory_for
from server.worker.worker import Worker

CUDA = torch.device("cuda", 0)
# As torch 2.11 writes it on a GPU that another process fills.
FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.06 GiB is "
    "free. Process 4711 has 138.10 GiB memory in use. See documentation for Memory Management  (https://...)"
)


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported ..."),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_every_way_of_saying_it_is_one_line_with_cures(error: Exception) -> None:
    line = str(exhausted(error))
    assert "\n" not in line
    assert "--gpu-memory-utilization" in line
    assert "other processes" in line


def test_the_line_says_how_much_was_asked_for_and_no_more() -> None:
    assert device_out_of_memory(FULL) == "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("CUDA out of memory"), OSError(5, "x")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert exhausted(error) is None
    with pytest.raises(type(error)), memory_for("a thing", "a cure", torch.device("cpu")):
        raise error


def test_what_is_free_is_told_where_the_gpu_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 140 << 30))
    with pytest.raises(
        UserError, match=r"no memory for the cache: CUDA out .* \(1.00 of 140.00 GiB of cuda:0 are free"
    ):
        with memory_for("the cache", "do something", CUDA):
            raise FULL

    def unusable(_: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", unusable)
    with pytest.raises(UserError, match=r"allocate 2.00 GiB; do something$"), memory_for("x", "do something", CUDA):
        raise FULL


@pytest.mark.parametrize(
    ("options", "device", "flag"),
    [
        (CacheOptions(num_gpu_blocks_override=9), CUDA, "--num-gpu-blocks-override 9"),
        (CacheOptions(gpu_memory_utilization=0.85), CUDA, "--gpu-memory-utilization 0.85"),
        (CacheOptions(cpu_kv_cache_gib=2.5), torch.device("cpu"), "--cpu-kv-cache-gib 2.5"),
    ],
)
def test_the_cache_names_the_flag_that_has_sized_it(options: CacheOptions, device: torch.device, flag: str) -> None:
    assert kv_cache.size_option(options, device) == flag


class StandInChild:
    """Takes the place of the link to the supervisor."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.timeline = Timeline("worker-0")

    def flush_spans(self) -> None:
        """Nobody reads them."""


@pytest.fixture
def starting(tmp_path: Path) -> Worker:
    config = ServerConfig(
        model=ModelOptions(model="tiny"),
        cache=CacheOptions(num_gpu_blocks_override=1000),
        scheduler=SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64),
        compilation=CompilationOptions(mode="eager"),
        device="cpu",
        runtime_dir=str(tmp_path),
    )
    return Worker(StandInChild(config))  # type: ignore[arg-type]


def full(*_: Any, **__: Any) -> None:
    raise FULL


@pytest.mark.parametrize(
    ("module", "name", "line"),
    [
        (worker, "init_device", "no memory for a CUDA context: .*; free memory that other processes hold"),
        (worker, "build_model", "no memory for the weights of tiny: .*; serve a smaller model, or free memory"),
        (worker, "fill_dummy_weights", "no memory for the weights of tiny: .*; serve a smaller model"),
        (kv_cache, "allocate", "no memory for the KV cache of .* GiB: .*; lower --num-gpu-blocks-override 1000$"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_each_part_of_a_start_names_its_cure(
    module: Any, name: str, line: str, starting: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, full)
    with pytest.raises(UserError, match=line):
        starting.start()


def test_more_blocks_than_the_host_has_memory_is_one_line(starting: Worker) -> None:
    starting.config.cache.num_gpu_blocks_override = 1 << 40
    with pytest.raises(UserError, match=r"no memory for the KV cache.*lower --num-gpu-blocks-override"):
        starting.start()


def test_a_cache_without_memory_does_not_speak_of_negative_sizes() -> None:
    with pytest.raises(UserError, match=r": 0\.00 GiB available"):
        kv_cache.num_blocks_for(CacheOptions(), 1 << 20, -(5 << 30))


def test_cpu_errors_pass_the_gpu_by() -> None:
    assert device_module._free_on(torch.device("cpu")) == ""
