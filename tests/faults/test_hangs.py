"""A worker that takes a step and never answers: the engine gives up on it; idle and slow ones are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from server.child import ConfigMessage, FailedMessage, StatusMessage
from server.config import ServerConfig
from server.ipc import api_to_engine, engine_to_worker, worker_to_engine
from server.ipc.api_to_engine import AbortRequests, AddRequest
from server.ipc.engine_to_worker import ScheduleStep
from server.ipc.worker_to_engine import StepResult, WorkerReady
from server.pulse import Pulse, create_pulse_fd
from server.sampling_params import SamplingParams

LIMIT_S = 0.8
_ENGINE = f"""
from server.child import run_child
from server.engine import __main__, core
core.STEP_LIMIT_S, core._TURN_MS = {LIMIT_S}, 50
run_child("engine", __main__.main)
"""


class Engine:
    """A real engine process with short limits; the test is its supervisor, its worker and its API process."""

    def __init__(self, runtime_dir: Path) -> None:
        config = ServerConfig(runtime_dir=str(runtime_dir))
        config.scheduler.async_scheduling = False
        self._pulse_fd = create_pulse_fd()
        self.pulse = Pulse(self._pulse_fd, 0)
        status, status_write = os.pipe()
        control_read, self._control = os.pipe()
        command = [sys.executable, "-c", _ENGINE, "--status-fd", str(status_write), "--control-fd", str(control_read)]
        self.process = subprocess.Popen(
            [*command, "--supervisor-pid", str(os.getpid())],
            pass_fds=(status_write, control_read, self._pulse_fd),
            stderr=subprocess.DEVNULL,
        )
        os.close(status_write)
        os.close(control_read)
        self._status = os.fdopen(status, "rb")
        os.write(self._control, msgspec.json.encode(ConfigMessage(config, None, (self._pulse_fd, 0))) + b"\n")
        self._context: zmq.Context[Any] = zmq.Context()
        self._from_engine = engine_to_worker.receiver(self._context, str(runtime_dir))
        self._to_engine = worker_to_engine.sender(self._context, str(runtime_dir))
        self._api = api_to_engine.sender(self._context, str(runtime_dir))
        self._to_engine.send(WorkerReady(64, 16, 256, 64, 512, "TORCH_SDPA", "cpu", "float32", "eager", 1))

    def add(self, max_tokens: int) -> None:
        self._api.send(AddRequest("r", 0, [1, 2, 3], SamplingParams(max_tokens=max_tokens), time.monotonic_ns()))

    def disturb(self) -> None:
        self._api.send(AbortRequests(["nobody"]))

    def step(self) -> ScheduleStep:
        message = self._from_engine.receive(20_000)
        assert isinstance(message, ScheduleStep)
        return message

    def answer(self, step: ScheduleStep) -> None:
        self._to_engine.send(StepResult(step.step_id, ["r"], [7], {}, {}))

    def failure(self) -> str:
        """What the engine told its supervisor before it ended."""
        messages: list[StatusMessage] = [msgspec.json.decode(line, type=StatusMessage) for line in self._status]
        assert isinstance(messages[-1], FailedMessage)
        return messages[-1].text

    def close(self) -> None:
        os.close(self._control)
        self._status.close()
        self.process.wait(10)
        for end in (self._from_engine, self._to_engine, self._api):
            end.close()
        self._context.term()
        self.pulse.close()
        os.close(self._pulse_fd)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.close()


def test_a_step_that_is_never_answered_ends_the_engine(engine: Engine) -> None:
    engine.add(max_tokens=4)
    engine.answer(engine.step())
    engine.step()
    deadline = time.monotonic() + 30
    while engine.process.poll() is None and time.monotonic() < deadline:
        engine.disturb()  # messages that keep coming are no sign of life of the worker's
        time.sleep(0.03)
    assert engine.process.returncode == 1
    assert f"has not finished a step within {LIMIT_S:g} s" in engine.failure()


def test_idle_and_slow_workers_are_left_alone(engine: Engine) -> None:
    engine.add(max_tokens=5)
    for _ in range(4):
        step = engine.step()
        time.sleep(0.35)
        engine.answer(step)
    engine.answer(engine.step())
    time.sleep(1.2)
    before = engine.pulse.read()
    time.sleep(0.5)
    assert engine.process.poll() is None
    assert engine.pulse.read() > before > 0, "the loop turns and says so"
