"""The worker as a process: real pipes, real sockets, an engine played by the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from server.child import ConfigMessage, ControlMessage, FailedMessage, ReadyMessage, SpanMessage, StatusMessage
from server.config import CacheOptions, CompilationOptions, ModelOptions, SchedulerOptions, ServerConfig
from server.ipc import engine_to_worker, worker_to_engine
from server.ipc.engine_to_worker import NewRequest, ScheduleStep
from server.ipc.worker_to_engine import StepResult, WorkerReady
from server.sampling_params import SamplingParams


class WorkerProcess:
    def __init__(self, config: ServerConfig) -> None:
        status_read, status_write = os.pipe()
        control_read, control_write = os.pipe()
        command = [sys.executable, "-m", "server.worker", "--supervisor-pid", str(os.getpid())]
        self.process = subprocess.Popen(
            [*command, "--status-fd", str(status_write), "--control-fd", str(control_read)],
            pass_fds=(status_write, control_read),
        )
        os.close(status_write)
        os.close(control_read)
        self.control = os.fdopen(control_write, "wb", buffering=0)
        self.status = os.fdopen(status_read, "rb")
        message: ControlMessage = ConfigMessage(config)
        self.control.write(msgspec.json.encode(message) + b"\n")

    def messages(self) -> list[StatusMessage]:
        """What the process reports until it is ready, fails or dies."""
        seen: list[StatusMessage] = []
        for line in self.status:
            seen.append(msgspec.json.decode(line, type=StatusMessage))
            if isinstance(seen[-1], ReadyMessage | FailedMessage):
                break
        return seen

    def close(self) -> None:
        self.control.close()
        self.status.close()
        self.process.wait(timeout=60)


@pytest.fixture
def start() -> Iterator[list[WorkerProcess]]:
    started: list[WorkerProcess] = []
    yield started
    for worker in started:
        worker.close()


def config_in(runtime_dir: Path, **model: object) -> ServerConfig:
    return ServerConfig(
        model=ModelOptions(**model),  # type: ignore[arg-type]
        cache=CacheOptions(num_gpu_blocks_override=8, block_size=16),
        scheduler=SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64),
        compilation=CompilationOptions(mode="eager"),
        device="cpu",
        runtime_dir=str(runtime_dir),
    )


def test_runs_steps(tmp_path: Path, start: list[WorkerProcess]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    to_worker = engine_to_worker.sender(context, str(tmp_path))
    from_worker = worker_to_engine.receiver(context, str(tmp_path))
    try:
        worker = WorkerProcess(config_in(tmp_path))
        start.append(worker)
        reported = worker.messages()
        assert isinstance(reported[-1], ReadyMessage)
        spans = {m.span.name for m in reported if isinstance(m, SpanMessage)}
        assert {"spawn", "imports", "config", "device", "model", "weights", "kv-cache", "warm-up"} <= spans
        ready = from_worker.receive(60_000)
        assert isinstance(ready, WorkerReady)
        assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (8, 16, 128)
        assert (ready.attention_backend, ready.device, ready.dtype) == ("TORCH_SDPA", "cpu", "float32")
        greedy = SamplingParams(max_tokens=4, temperature=0.0)
        new = NewRequest("r", [1, 2, 3, 4, 5], 5, greedy, [3], 0)
        to_worker.send(ScheduleStep(0, [new], {"r": 3}, {}, []))
        to_worker.send(ScheduleStep(1, [], {"r": 2}, {}, []))
        to_worker.send(ScheduleStep(2, [], {"r": 1}, {}, []))
        results = [from_worker.receive(60_000) for _ in range(3)]
        assert [r.request_ids for r in results if isinstance(r, StepResult)] == [[], ["r"], ["r"]]
    finally:
        to_worker.close()
        from_worker.close()
        context.term()


def test_wrong_model_is_one_line(tmp_path: Path, start: list[WorkerProcess]) -> None:
    worker = WorkerProcess(config_in(tmp_path, model=str(tmp_path)))
    start.append(worker)
    last = worker.messages()[-1]
    assert last == FailedMessage(f"{tmp_path}/config.json: no such file", user_error=True)
    assert worker.process.wait(timeout=60) == 2


def test_dies_with_its_supervisor(tmp_path: Path, start: list[WorkerProcess]) -> None:
    worker = WorkerProcess(config_in(tmp_path))
    start.append(worker)
    assert isinstance(worker.messages()[-1], ReadyMessage)
    worker.control.close()
    assert worker.process.wait(timeout=60) == 1
