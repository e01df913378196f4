"""Clients that go or stall, a full queue, draining, a dead engine."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from server.child import DrainMessage, PeerDiedMessage
from server.config import ServerConfig
from server.ipc.sockets import endpoint
from tests.integration.api_harness import ApiProcess, FakeEngine, Server, events

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Server] = []

    def begin(config: ServerConfig | None = None, max_model_len: int = 4096) -> Server:
        running.append(Server(tmp_path, config, max_model_len))
        return running[-1]

    yield begin
    for server in running:
        server.close()


def post(connection: socket.socket, **fields: Any) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 4000, **fields}).encode()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


def small_reader(server: Server) -> socket.socket:
    """A connection whose kernel buffers are soon full."""
    connection = socket.socket()
    connection.settimeout(30)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    return connection


class Background:
    """A request in a thread."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self.answer: httpx.Response | None = None
        self._server = server
        self._fields = {"prompt": "x", **fields}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._server.client() as client:
            self.answer = client.post("/v1/completions", json=self._fields)

    def result(self) -> httpx.Response:
        self._thread.join(30)
        assert self.answer is not None
        return self.answer


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_goes_is_aborted_in_the_engine(start: Start, stream: bool) -> None:
    server = start()
    server.engine.step_s = 0.01
    with server.raw() as connection:
        post(connection, stream=stream, n=2)
        server.wait_for(lambda: len(server.engine.requests) == 2)
        if stream:
            assert b"200 OK" in connection.recv(4096)
    ids = {request.request_id for request in server.engine.requests}
    server.wait_for(lambda: set(server.engine.aborted) == ids)
    with server.client() as client:
        assert 'finished_reason="abort",model_name="tiny"} 2.0' in client.get("/metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_is_gone_before_its_request_is_taken_in(start: Start, stream: bool) -> None:
    server = start()
    server.engine.paused.set()
    for _ in range(40):
        with server.raw() as connection:
            post(connection, stream=stream)
    server.engine.paused.clear()
    server.wait_for(lambda: len(server.engine.aborted) == len(server.engine.requests))
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_client_that_goes_while_sending_its_body_harms_nobody(start: Start) -> None:
    server = start()
    with server.raw() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert server.api.process.poll() is None


def test_full_queue_answers_429_and_recovers(start: Start) -> None:
    config = ServerConfig()
    config.scheduler.max_queue = 2
    config.scheduler.max_num_seqs = 3
    server = start(config)
    server.engine.paused.set()
    held = [Background(server, max_tokens=2) for _ in range(5)]
    server.wait_for(lambda: len(server.engine.requests) == 5)
    with server.client() as client:
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        too_many = client.post("/v1/completions", json={"prompt": "x", "n": 6})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        server.engine.paused.clear()
        assert [request.result().status_code for request in held] == [200] * 5
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        assert 'benchctl:requests_rejected_total{model_name="tiny"} 1.0' in client.get("/metrics").text


def test_full_queue_refuses_before_the_prompt_is_tokenized(start: Start) -> None:
    """Else it would say that the prompt is too long."""
    config = ServerConfig()
    config.scheduler.max_queue = config.scheduler.max_num_seqs = 1
    server = start(config)
    server.engine.paused.set()
    held = [Background(server, max_tokens=1) for _ in range(2)]
    server.wait_for(lambda: len(server.engine.requests) == 2)
    too_long = "x" * 5000
    requests = [
        ("/v1/completions", {"prompt": too_long}),
        ("/v1/completions", {"prompt": [1] * 5000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": too_long}]}),
    ]
    with server.client() as client:
        for path, body in requests:
            assert client.post(path, json=body).status_code == 429
            assert client.post(path, json={**body, "temperature": -1}).status_code == 400
        server.engine.paused.clear()
        assert [request.result().status_code for request in held] == [200] * 2
        assert [client.post(path, json=body).status_code for path, body in requests] == [400] * 3


def test_engines_own_count_of_waiting_requests_bounds_the_queue(start: Start) -> None:
    config = ServerConfig()
    config.scheduler.max_queue = 1
    server = start(config)
    server.engine.step_s = 0.01
    server.engine.num_waiting = 1
    with server.raw() as connection, server.client() as client:
        post(connection, stream=True)
        assert b"200 OK" in connection.recv(4096)
        server.wait_for(lambda: client.post("/v1/completions", json={"prompt": "x"}).status_code == 429)
        server.engine.num_waiting = 0
        server.wait_for(lambda: client.post("/v1/completions", json={"prompt": "x"}).status_code == 200)


def test_reader_that_stalls_is_cut_and_others_go_on(start: Start) -> None:
    server = start(max_model_len=1 << 30)
    server.engine.tokens_per_step = 2048
    with small_reader(server) as stalled, server.client() as client:
        post(stalled, stream=True, max_tokens=1 << 29)
        server.wait_for(lambda: len(server.engine.requests) == 1)
        [request] = server.engine.requests
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 9, "stream": True})
        assert "".join(chunk["choices"][0]["text"] for chunk in events(answer.text)[:-1]) == "hello wor"
        server.wait_for(lambda: request.request_id in server.engine.aborted, timeout_s=60)
        assert client.get("/health").status_code == 200


def test_reader_that_pauses_gets_everything_in_fewer_events(start: Start) -> None:
    config = ServerConfig()
    # A long name makes events large enough to fill the kernel's buffers soon.
    config.model.served_model_name = "m" * 2000
    server = start(config, max_model_len=1 << 20)
    server.engine.step_s = 0.0
    length = 6000
    generated = f'benchctl:generation_tokens_total{{model_name="{"m" * 2000}"}} {length}.0'
    with small_reader(server) as connection, server.client() as client:
        post(connection, stream=True, max_tokens=length)
        server.wait_for(lambda: generated in client.get("/metrics").text)
        received = bytearray()
        while b"[DONE]" not in received[-64:]:
            data = connection.recv(1 << 20)
            assert data
            received += data
    body = received.split(b"\r\n\r\n", 1)[1]
    chunks = events(_dechunk(bytes(body)).decode())[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ("hello world, " * length)[:length]
    assert len(chunks) < length


def _dechunk(body: bytes) -> bytes:
    parts: list[bytes] = []
    place = 0
    while place < len(body):
        end = body.index(b"\r\n", place)
        size = int(body[place:end], 16)
        parts.append(body[end + 2 : end + 2 + size])
        place = end + 4 + size
    return b"".join(parts)


def test_drain_finishes_what_is_in_flight_and_refuses_the_rest(start: Start) -> None:
    server = start()
    server.engine.paused.set()
    held = Background(server, max_tokens=5)
    server.wait_for(lambda: len(server.engine.requests) == 1)
    with server.client() as client:
        assert client.get("/health").status_code == 200
        server.api.control(DrainMessage(30))
        server.wait_for(lambda: client.get("/health").status_code == 503)
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "shutting_down"
        server.engine.paused.clear()
        answer = held.result()
    assert answer.json()["choices"][0]["text"] == "hello"
    assert server.api.process.wait(20) == 0


def test_drain_aborts_what_does_not_finish_in_time(start: Start) -> None:
    server = start()
    server.engine.step_s = 0.01
    whole = Background(server, max_tokens=4000)
    stream = Background(server, max_tokens=4000, stream=True)
    server.wait_for(lambda: len(server.engine.requests) == 2)
    server.api.control(DrainMessage(0.2))
    answer = whole.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "aborted")
    last = events(stream.result().text)[-1]
    assert last["error"]["code"] == "aborted"
    assert server.api.process.wait(20) == 0
    assert {request.request_id for request in server.engine.requests} == set(server.engine.aborted)


def test_dead_peer_fails_streams_with_an_event_and_the_process_exits_non_zero(start: Start) -> None:
    server = start()
    server.engine.step_s = 0.01
    whole = Background(server, max_tokens=4000)
    stream = Background(server, max_tokens=4000, stream=True)
    server.wait_for(lambda: len(server.engine.requests) == 2)
    with server.client() as client:
        assert client.get("/health").status_code == 200
        server.api.control(PeerDiedMessage("the worker was killed"))
        assert whole.result().status_code == 500
        error = whole.result().json()["error"]
        assert (error["code"], "the worker was killed" in error["message"]) == ("engine_dead", True)
        assert events(stream.result().text)[-1]["error"]["code"] == "engine_dead"
    assert server.api.process.wait(20) == 1


def test_health_is_503_while_dying(start: Start) -> None:
    server = start()
    with server.client() as client:
        client.get("/health")
        server.api.control(PeerDiedMessage("gone"))
        seen: set[int] = set()
        while server.api.process.poll() is None:
            try:
                seen.add(client.get("/health").status_code)
            except httpx.TransportError:
                break
        assert 503 in seen
    assert server.api.process.wait(20) == 1


def test_bytes_that_are_no_message_end_the_process(start: Start) -> None:
    """The engine's socket lies in a private directory; what comes from it and is no message is a broken engine."""
    server = start()
    context = zmq.Context()
    socket_ = context.socket(zmq.PUSH)
    socket_.connect(endpoint(server.config.runtime_dir, "api-0-in"))
    socket_.send(b"\x93\xa7outputs\x01\x02")
    assert server.api.process.wait(20) == 1
    socket_.close()
    context.term()


def test_peer_that_dies_before_the_model_is_ready(tmp_path: Path) -> None:
    config = ServerConfig(runtime_dir=str(tmp_path))
    api = ApiProcess(config)
    api.control(PeerDiedMessage("the worker could not load the model"))
    assert api.process.wait(20) == 1
    api.close()


def test_nothing_listens_before_the_model_is_ready(tmp_path: Path) -> None:
    config = ServerConfig(runtime_dir=str(tmp_path))
    api = ApiProcess(config)
    try:
        address = api.listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        engine = FakeEngine(str(tmp_path))
        ready = api.wait_ready()
        assert ready.info["max_model_len"] == 4096
        socket.create_connection(address, timeout=5).close()
        engine.close()
    finally:
        api.close()


def test_supervisor_that_goes_takes_the_process_along(start: Start) -> None:
    server = start()
    server.api.close()
    assert server.api.process.poll() is not None


def test_ctrl_c_and_sigint_are_the_supervisors_business(start: Start) -> None:
    server = start()
    server.api.process.send_signal(signal.SIGINT)
    with server.client() as client:
        assert client.get("/health").status_code == 200


def test_bad_model_is_a_user_error(tmp_path: Path) -> None:
    config = ServerConfig(runtime_dir=str(tmp_path))
    config.model.chat_template = str(tmp_path / "missing.jinja")
    api = ApiProcess(config)
    with pytest.raises(AssertionError, match=r"missing\.jinja: no such file"):
        api.wait_ready()
    assert api.process.wait(20) == 2
    api.close()


def test_a_chat_template_that_hangs_in_c_is_a_bad_request(start: Start, tmp_path: Path) -> None:
    """It would hold the interpreter's lock of whichever process it runs in."""
    template = tmp_path / "hangs.jinja"
    template.write_text("{% if n %}{{ messages|length|round(n) }}{% endif %}{{ messages[0].content }}")
    config = ServerConfig()
    config.model.chat_template = str(template)
    server = start(config)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    answers: list[httpx.Response] = []

    def hang() -> None:
        with server.client() as client:
            answers.append(client.post("/v1/chat/completions", json=body | {"chat_template_kwargs": {"n": -3 * 10**9}}))

    thread = threading.Thread(target=hang)
    thread.start()
    with server.client() as client:
        while thread.is_alive():
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    thread.join()
    assert answers[0].status_code == 400
    assert answers[0].json()["error"]["message"] == "The chat template took longer than 5 s"


def test_a_chat_template_that_hangs_while_it_is_compiled_is_a_user_error(tmp_path: Path) -> None:
    template = tmp_path / "hangs.jinja"
    template.write_text("{{ 1|round(-3000000000) }}")
    config = ServerConfig(runtime_dir=str(tmp_path))
    config.model.chat_template = str(template)
    api = ApiProcess(config)
    with pytest.raises(AssertionError, match=r"hangs\.jinja: the chat template took longer than 5 s"):
        api.wait_ready()
    assert api.process.wait(20) == 2
    api.close()


def test_two_api_processes_share_an_engine_and_a_port(tmp_path: Path) -> None:
    config = ServerConfig(runtime_dir=str(tmp_path))
    config.api.api_server_count = 2
    engine = FakeEngine(str(tmp_path))
    processes = [ApiProcess(config, index) for index in range(2)]
    try:
        for api in processes:
            api.wait_ready()
        for api in processes:
            answer = httpx.post(f"{api.url}/v1/completions", json={"prompt": "x", "max_tokens": 5}, timeout=30)
            assert answer.json()["choices"][0]["text"] == "hello"
        assert sorted(request.client_index for request in engine.requests) == [0, 1]
        for api in processes:
            # Whichever is scraped answers for both, once the other has published its counts.
            _wait_for_metric(api.url, "benchctl:generation_tokens_total", 10.0)
    finally:
        for api in processes:
            api.close()
        engine.close()


def test_the_queue_of_two_api_processes_is_one(tmp_path: Path) -> None:
    """Wherever the connections land: neither a share that is full while the other is empty, nor twice the bound."""
    config = ServerConfig(runtime_dir=str(tmp_path))
    config.api.api_server_count = 2
    config.scheduler.max_queue = config.scheduler.max_num_seqs = 2
    engine = FakeEngine(str(tmp_path))
    engine.paused.set()
    processes = [ApiProcess(config, index) for index in range(2)]
    connections: list[socket.socket] = []
    try:
        for api in processes:
            api.wait_ready()
        first, second = (httpx.Client(base_url=api.url, timeout=30) for api in processes)
        with first, second:
            assert second.post("/v1/completions", json={"prompt": "x", "n": 5}).json()["error"]["param"] == "n"
            for number in range(4):
                connections.append(socket.create_connection(processes[0].address, timeout=30))
                post(connections[-1], max_tokens=1)
                _wait_until(lambda wanted=number + 1: len(engine.requests) == wanted)
            assert [client.post("/v1/completions", json={"prompt": "x"}).status_code for client in (first, second)] == [
                429,
                429,
            ]
            engine.paused.clear()
            for connection in connections:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
            assert second.post("/v1/completions", json={"prompt": "x", "n": 4}).status_code == 200
    finally:
        for connection in connections:
            connection.close()
        for api in processes:
            api.close()
        engine.close()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def _wait_for_metric(url: str, name: str, value: float) -> None:
    for _ in range(400):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        if any(line.startswith(f"{name}{{") and line.endswith(f" {value}") for line in lines):
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} is never {value}")
