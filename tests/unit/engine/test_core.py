"""The engine as a process: real pipes, real sockets; worker and API processes are played by the test."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from server.child import ConfigMessage, ControlMessage, DrainMessage, FailedMessage, ReadyMessage, StatusMessage
from server.config import SchedulerOptions, ServerConfig
from server.engine.core import mixed_prefill_tokens
from server.ipc import api_to_engine, engine_to_worker, worker_to_engine
from server.ipc.api_to_engine import AbortRequests, AddRequest, ApiReady
from server.ipc.engine_to_api import EngineReady, FromEngine, RequestOutput, StepOutputs
from server.ipc.engine_to_worker import ScheduleStep
from server.ipc.sockets import Receiver, endpoint
from server.ipc.worker_to_engine import StepResult, WorkerReady
from server.sampling_params import SamplingParams
from tests.unit.engine.fake_worker import VOCABULARY, FakeWorker, quiet_run

TIMEOUT_MS = 20_000
BLOCKS, BLOCK_SIZE, SEQUENCES, BUDGET, CONTEXT = 24, 4, 6, 16, 64


class Engine:
    """`python -m server.engine` between a worker thread that checks and two API clients."""

    def __init__(self, runtime_dir: Path, **options: Any) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        directory = str(runtime_dir)
        scheduler = SchedulerOptions(max_num_seqs=SEQUENCES, **options)
        self.process, self.control, self.status = self._spawn(ServerConfig(scheduler=scheduler, runtime_dir=directory))
        self.outputs: list[Receiver[FromEngine]] = [
            Receiver(self.context, endpoint(directory, f"api-{client}-in"), FromEngine, bind=True) for client in (0, 1)
        ]
        self.requests = api_to_engine.sender(self.context, directory)
        self.worker = FakeWorker(BLOCKS, BLOCK_SIZE, SEQUENCES, BUDGET)
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(directory,), name="fake-worker")
        self._thread.start()

    @staticmethod
    def _spawn(config: ServerConfig) -> tuple[subprocess.Popen[bytes], Any, Any]:
        status_read, status_write = os.pipe()
        control_read, control_write = os.pipe()
        command = [sys.executable, "-W", "error", "-m", "server.engine", "--supervisor-pid", str(os.getpid())]
        process = subprocess.Popen(
            [*command, "--status-fd", str(status_write), "--control-fd", str(control_read)],
            pass_fds=(status_write, control_read),
        )
        os.close(status_write)
        os.close(control_read)
        control, status = os.fdopen(control_write, "wb", buffering=0), os.fdopen(status_read, "rb")
        message: ControlMessage = ConfigMessage(config)
        control.write(msgspec.json.encode(message) + b"\n")
        return process, control, status

    def _work(self, directory: str) -> None:
        receiver = engine_to_worker.receiver(self.context, directory)
        sender = worker_to_engine.sender(self.context, directory)
        sender.send(
            WorkerReady(BLOCKS, BLOCK_SIZE, CONTEXT, BUDGET, VOCABULARY, "TORCH_SDPA", "cpu", "float32", "eager", 1)
        )
        try:
            while not self._stop.is_set():
                message = receiver.receive(timeout_ms=20)
                if isinstance(message, ScheduleStep):
                    data = self.worker.execute(msgspec.msgpack.encode(message))
                    sender.send(msgspec.msgpack.decode(data, type=StepResult))
        except BaseException as error:  # the test must hear of it
            self.failure = error
        finally:
            receiver.close()
            sender.close()

    def wait_ready(self) -> None:
        for line in self.status:
            message: StatusMessage = msgspec.json.decode(line, type=StatusMessage)
            assert not isinstance(message, FailedMessage), message
            if isinstance(message, ReadyMessage):
                break
        for client in (0, 1):
            self.requests.send(ApiReady(client))
            ready = self.outputs[client].receive(TIMEOUT_MS)
            assert isinstance(ready, EngineReady)
            assert (ready.num_blocks, ready.max_model_len) == (BLOCKS, CONTEXT)

    def receive(self, client: int) -> FromEngine:
        message = self.outputs[client].receive(TIMEOUT_MS)
        assert self.failure is None, self.failure
        assert message is not None, "the engine is silent"
        return message

    def close(self) -> None:
        self.control.close()
        self.process.wait(20)
        self._stop.set()
        self._thread.join()
        self.status.close()
        for socket in (*self.outputs, self.requests):
            socket.close()
        self.context.term()


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(tmp_path, **getattr(request, "param", {}))
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.close()


def collect(engine: Engine, client: int, wanted: set[str]) -> tuple[dict[str, list[RequestOutput]], StepOutputs]:
    """Outputs of one client until all `wanted` requests have ended, and the last message."""
    outputs: dict[str, list[RequestOutput]] = {}
    wanted = set(wanted)
    while True:
        message = engine.receive(client)
        assert isinstance(message, StepOutputs)
        for output in message.outputs:
            outputs.setdefault(output.request_id, []).append(output)
            if output.finish_reason is not None:
                wanted.remove(output.request_id)
        if not wanted:
            return outputs, message


@pytest.mark.parametrize("engine", [{"async_scheduling": True}, {"async_scheduling": False}], indirect=True)
def test_two_clients_get_the_tokens_of_their_requests(engine: Engine) -> None:
    rng = random.Random(1)
    common = [rng.randrange(VOCABULARY) for _ in range(20)]
    messages = []
    for i in range(40):
        prompt = common[: rng.randrange(1, 20)] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(20))]
        sampling = SamplingParams(max_tokens=rng.choice([1, 5, 30]), eos_token_ids=(3,))
        messages.append(AddRequest(f"r{i}", i % 2, prompt, sampling, 0))
        engine.requests.send(messages[-1])
    engine.requests.send(AbortRequests(["r0", "r5", "nobody"]))
    for client in (0, 1):
        mine = [m for m in messages if m.client_index == client]
        outputs, last = collect(engine, client, {m.request_id for m in mine})
        assert set(outputs) == {m.request_id for m in mine}
        for message in mine:
            parts = outputs[message.request_id]
            tokens = [token for part in parts for token in part.new_token_ids]
            expected, reason = quiet_run(message.prompt_token_ids, message.sampling, CONTEXT)
            if parts[-1].finish_reason == "abort":
                assert message.request_id in ("r0", "r5")
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, parts[-1].finish_reason) == (expected, reason)
            if tokens:
                assert 0 < parts[0].queued_ns <= parts[0].scheduled_ns <= last.time_ns
    # Both have ended: the statistics, which every client hears, say that nothing is held.
    while last.stats is not None and last.stats.num_running:
        message_ = engine.receive(1)
        assert isinstance(message_, StepOutputs)
        last = message_
    assert last.stats is not None
    assert (last.stats.num_running, last.stats.num_waiting, last.stats.kv_cache_usage) == (0, 0, 0)
    assert last.stats.num_preemptions > 0
    assert last.stats.prefix_cache_hits > 0
    assert {"schedule", "send", "update", "wait"} <= last.stats.step_seconds.keys()


def test_who_waits_for_nothing_hears_of_the_state_but_not_of_every_step(engine: Engine) -> None:
    def receive() -> StepOutputs:
        message = engine.receive(1)
        assert isinstance(message, StepOutputs)
        return message

    engine.requests.send(AddRequest("r", 0, [1], SamplingParams(max_tokens=50), 0))
    outputs, last = collect(engine, 0, {"r"})
    heard = [receive()]
    while heard[-1].stats is None or heard[-1].stats.num_running:
        heard.append(receive())
    assert not any(message.outputs for message in heard)
    assert len(heard) < len(outputs["r"]) == 50
    assert last.stats is not None
    assert last.stats.num_steps >= 50


def test_refuses_what_cannot_run_and_survives_garbage(engine: Engine) -> None:
    for garbage in (b"", b"\xff\x00", msgspec.msgpack.encode(["add", "x"]), msgspec.msgpack.encode({"a": 1})):
        engine.requests.socket.send(garbage)
    engine.requests.send(AddRequest("long", 0, [1] * CONTEXT, SamplingParams(max_tokens=1), 0))
    engine.requests.send(AddRequest("empty", 0, [], SamplingParams(max_tokens=1), 0))
    engine.requests.send(AddRequest("good", 0, [1, 2], SamplingParams(max_tokens=1), 0))
    outputs, _ = collect(engine, 0, {"long", "empty", "good"})
    assert [part.finish_reason for part in outputs["long"] + outputs["empty"]] == ["error", "error"]
    assert outputs["good"][-1].finish_reason == "length"
    assert engine.process.poll() is None


def test_leaves_when_told_to_drain(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    try:
        engine.wait_ready()
        message: ControlMessage = DrainMessage(1.0)
        engine.control.write(msgspec.json.encode(message) + b"\n")
        assert engine.process.wait(20) == 0
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("device", "parameters", "tokens"),
    [
        ("cuda:0", 8_030_261_248, 2048),
        ("cuda:0", 596_049_920, 27648),
        ("cuda:0", 70_553_706_496, 512),
        ("cpu", 134_515_008, None),
    ],
)
def test_the_default_of_mixed_prefill_tokens_follows_the_size_of_the_model(
    device: str, parameters: int, tokens: int | None
) -> None:
    ready = WorkerReady(1, 16, 64, 8192, 100, "TORCH_SDPA", device, "bfloat16", "compile", parameters)
    assert mixed_prefill_tokens(ready) == tokens
