"""An API process (in a thread or a real one) in front of a fake engine that speaks over real ZMQ sockets."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from server.child import ConfigMessage, ControlMessage, FailedMessage, ReadyMessage, StatusMessage
from server.config import ServerConfig
from server.ipc import api_to_engine, engine_to_api
from server.ipc.api_to_engine import AbortRequests, AddRequest, ApiReady
from server.ipc.engine_to_api import EngineReady, EngineStats, RequestOutput, StepOutputs, TokenLogprobs
from server.listen import bind_socket

API_KEY = "secret-key"


def words(request: AddRequest) -> Iterator[int]:
    """Default tokens of the fake: the bytes of `hello world, ` over and over."""
    while True:
        yield from b"hello world, "


class FakeEngine:
    """Answers every request with one token a step; `script(request)` says which tokens."""

    def __init__(self, runtime_dir: str, max_model_len: int = 4096) -> None:
        self.script: Callable[[AddRequest], Iterator[int]] = words
        self.requests: list[AddRequest] = []
        self.aborted: list[str] = []
        self.num_waiting = 0
        self.paused = threading.Event()
        """While set, no step runs."""
        self.step_s = 0.0005
        self.tokens_per_step = 1
        self.max_model_len = max_model_len
        self._running: dict[str, tuple[AddRequest, Iterator[int], list[int]]] = {}
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._receiver = api_to_engine.receiver(self._context, runtime_dir)
        self._runtime_dir = runtime_dir
        self._senders: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            busy = self._running and not self.paused.is_set()
            timeout_ms = 0 if busy else 20
            while (message := self._receiver.receive(timeout_ms=timeout_ms)) is not None:
                self._take(message)
                timeout_ms = 0
            if self._running and not self.paused.is_set():
                self._step()
                time.sleep(self.step_s)
        for sender in self._senders.values():
            sender.close()
        self._receiver.close()
        self._context.term()

    def _take(self, message: Any) -> None:
        if isinstance(message, ApiReady):
            sender = engine_to_api.sender(self._context, self._runtime_dir, message.client_index)
            self._senders[message.client_index] = sender
            sender.send(EngineReady(self.max_model_len, 100, 16, "TORCH_SDPA", "cpu", "float32", "eager", 512))
        elif isinstance(message, AddRequest):
            self.requests.append(message)
            self._running[message.request_id] = (message, self.script(message), [])
        elif isinstance(message, AbortRequests):
            self.aborted += message.request_ids
            for request_id in message.request_ids:
                self._running.pop(request_id, None)

    def _step(self) -> None:
        outputs: dict[int, list[RequestOutput]] = {}
        for request_id, (request, tokens, done) in list(self._running.items()):
            params = request.sampling
            room = params.max_tokens - len(done)
            new = list(itertools.islice(tokens, min(self.tokens_per_step, room)))
            token = new[-1]
            output = RequestOutput(request_id, new)
            if not done:
                now = time.monotonic_ns()
                output.queued_ns, output.scheduled_ns = now, now
                output.num_cached_tokens = min(16, len(request.prompt_token_ids) - 1)
                if (k := params.prompt_logprobs) is not None:
                    output.prompt_logprobs = [None, *(self._logprobs(t, k) for t in request.prompt_token_ids[1:])]
            if params.logprobs is not None:
                output.logprobs = [self._logprobs(token, params.logprobs)]
            done += new
            if len(done) > params.min_tokens and token in params.eos_token_ids:
                output.finish_reason = "stop"
            elif len(done) > params.min_tokens and token in params.stop_token_ids:
                output.finish_reason, output.stop_token_id = "stop", token
            elif len(done) == params.max_tokens:
                output.finish_reason = "length"
            if output.finish_reason is not None:
                del self._running[request_id]
            outputs.setdefault(request.client_index, []).append(output)
        stats = EngineStats(num_running=len(self._running), num_waiting=self.num_waiting, num_steps=1)
        for client, batch in outputs.items():
            self._senders[client].send(StepOutputs(batch, stats, time.monotonic_ns()))

    @staticmethod
    def _logprobs(token: int, k: int) -> TokenLogprobs:
        others = [(token + 1 + place) % 256 for place in range(k)]
        return TokenLogprobs([token, *others], [-0.5, *(-1.0 - place for place in range(k))], 1)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)


class ApiProcess:
    """A real `python -m server.api` under a supervisor of a few lines."""

    def __init__(self, config: ServerConfig, index: int = 0) -> None:
        self.listener = bind_socket("127.0.0.1", 0)
        self.address: tuple[str, int] = self.listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        status_read, status_write = os.pipe()
        control_read, self._control = os.pipe()
        command = [sys.executable, "-W", "error", "-m", "server.api"]
        command += ["--status-fd", str(status_write), "--control-fd", str(control_read)]
        command += ["--supervisor-pid", str(os.getpid()), "--index", str(index)]
        self.process = subprocess.Popen(command, pass_fds=(status_write, control_read, self.listener.fileno()))
        os.close(status_write)
        os.close(control_read)
        self._status = os.fdopen(status_read, "rb")
        self.control(ConfigMessage(config, self.listener.fileno()))
        self.messages: list[StatusMessage] = []

    def control(self, message: ControlMessage) -> None:
        os.write(self._control, msgspec.json.encode(message) + b"\n")

    def wait_ready(self) -> ReadyMessage:
        for line in self._status:
            message: StatusMessage = msgspec.json.decode(line, type=StatusMessage)
            self.messages.append(message)
            if isinstance(message, ReadyMessage):
                self.listener.close()
                return message
            if isinstance(message, FailedMessage):
                raise AssertionError(message.text)
        raise AssertionError("the API process ended before it was ready")

    def close(self) -> None:
        if self._status.closed:
            return
        self.listener.close()
        os.close(self._control)
        self._status.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Server:
    """An API process with a fake engine behind it."""

    def __init__(self, runtime_dir: Path, config: ServerConfig | None = None, max_model_len: int = 4096) -> None:
        self.config = config or ServerConfig()
        self.config.runtime_dir = str(runtime_dir)
        self.engine = FakeEngine(str(runtime_dir), max_model_len)
        self.api = ApiProcess(self.config)
        self.ready = self.api.wait_ready()
        self.url = self.api.url

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.01)

    def raw(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def close(self) -> None:
        self.api.close()
        self.engine.close()


def events(text: str) -> list[Any]:
    """The JSON of a stream's events; `[DONE]` stays text."""
    datas = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]
