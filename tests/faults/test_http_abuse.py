"""Clients that abuse HTTP itself: endless headers and trailers, bodies that never end, readers that do not read,
pipelining, more connections than there are descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from server.api import http_protocol
from server.api.body import RECEIVED_BYTES
from server.api.http_protocol import MAX_HEADER_BYTES, HttpProtocol
from server.listen import bind_socket
from tests.integration.api_harness import Server, events

LARGE = 8 << 20


class App:
    """`/large` answers with much, `/stream` until its client is gone, `/read` after the body, the rest at once."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            await self._stream(receive, send)
            return
        headers = [(b"content-length", b"%d" % (LARGE if scope["path"] == "/large" else 2))]
        if scope["path"] == "/read":
            while (await receive()).get("more_body"):
                pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * LARGE if scope["path"] == "/large" else b"ok"})

    async def _stream(self, receive: Receive, send: Send) -> None:
        async def ticks() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"tick", "more_body": True})
                await asyncio.sleep(0.02)

        task = asyncio.create_task(ticks())
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()
        self.gone.set()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Http:
    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self.port = port

    @contextlib.asynccontextmanager
    async def connect(
        self, receive_buffer: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 10)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
async def http(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Http]:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http_protocol, "READ_STALL_S", 0.5)
    listener = bind_socket("127.0.0.1", 0)
    app = App()
    server = _Uvicorn(uvicorn.Config(app, http=HttpProtocol, ws="none", lifespan="off", log_config=None))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    yield Http(app, listener.getsockname()[1])
    server.should_exit = True
    await task


async def send_for_ever(writer: asyncio.StreamWriter, data: bytes, limit: int = 32 << 20) -> int:
    """Bytes that were taken before the connection broke, `limit` if it never did."""
    sent = 0
    try:
        while sent < limit:
            writer.write(data)
            await writer.drain()
            sent += len(data)
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    return sent


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\n"])
async def test_endless_headers_are_refused(http: Http, head: bytes) -> None:
    more = b"a: b\r\n" * 4096 if head.endswith(b"\n") else b"a" * 16384
    async with http.connect() as (_, writer):
        writer.write(head)
        assert await send_for_ever(writer, more) < 8 << 20


async def test_large_headers_are_told_so(http: Http) -> None:
    async with http.connect() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n")
        await writer.drain()
        for _ in range(3):
            await asyncio.sleep(0.05)
            writer.write(b"x: " + b"y" * 30000 + b"\r\n")
            await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("size", [60_000, 70_000, 180_000])
async def test_headers_in_one_packet_are_measured_as_well(http: Http, size: int) -> None:
    async with http.connect() as (reader, writer):
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx: %b\r\n\r\n" % (b"y" * size))
            if size > MAX_HEADER_BYTES:
                assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")
                assert b"too large" in await reader.read()
                break
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_endless_trailers_are_refused(http: Http) -> None:
    async with http.connect() as (_, writer):
        writer.write(b"POST /read HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
        await writer.drain()
        assert await send_for_ever(writer, b"t: " + b"x" * 16384 + b"\r\n") < 8 << 20


async def test_small_chunks_are_no_attack(http: Http) -> None:
    async with http.connect() as (reader, writer):
        writer.write(b"POST /read HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(40):
            writer.write(b"1\r\nx\r\n" * 1000)
            await writer.drain()
            await asyncio.sleep(0.005)
        writer.write(b"0\r\n\r\n")
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"


async def test_an_unread_body_must_end_some_time(http: Http) -> None:
    """The answer came before the body: the rest may trickle in for a while, not for ever."""
    async with http.connect() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.05)


async def test_a_body_that_ends_late_keeps_its_connection(http: Http) -> None:
    async with http.connect() as (reader, writer):
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\n")
            writer.write(b"xx")
            await asyncio.sleep(0.8)


async def test_a_reader_that_reads_nothing_is_cut(http: Http) -> None:
    async with http.connect(receive_buffer=4096) as (reader, writer):
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(1.5)
        received = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                received += len(data)
        assert received < LARGE


async def test_a_slow_reader_that_reads_gets_everything(http: Http) -> None:
    async with http.connect(receive_buffer=1 << 16) as (reader, writer):
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        received = 0
        while received < LARGE:
            data = await reader.read(1 << 20)
            assert data
            received += len(data)
            if received % (1 << 20) < len(data):
                await asyncio.sleep(0.2)


async def test_the_request_before_a_pipelined_one_hears_that_its_client_is_gone(http: Http) -> None:
    async with http.connect() as (reader, writer):
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"tick")
    async with asyncio.timeout(10):
        await http.app.gone.wait()


async def test_a_client_that_ends_its_side_is_taken_for_gone(http: Http) -> None:
    """Most who close a connection look the same, and nobody must generate for them."""
    async with http.connect() as (reader, writer):
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"tick")
        writer.write_eof()
        async with asyncio.timeout(10):
            await http.app.gone.wait()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


def ask(server: Server) -> str:
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5}).json()
    text: str = answer["choices"][0]["text"]
    return text


def test_pipelined_requests_are_answered_in_order(api: Server) -> None:
    requests = []
    for length in range(1, 40):
        body = b'{"prompt": "x", "max_tokens": %d}' % length
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(body)
        requests.append(head + (b"connection: close\r\n" if length == 39 else b"") + b"\r\n" + body)
    with api.raw() as connection:
        connection.sendall(b"".join(requests))
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    answers = [part.rpartition(b'"completion_tokens":')[2] for part in received.split(b"HTTP/1.1 200 OK")[1:]]
    assert [int(answer.split(b",")[0]) for answer in answers] == list(range(1, 40))


def test_a_stream_for_http_1_0_has_no_chunks(api: Server) -> None:
    body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
    with api.raw() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, text = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    chunks = events(text.decode())
    assert chunks.pop() == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hel"


def test_a_stream_that_waits_shows_its_headers(api: Server) -> None:
    """They leave with the first event, but not much later than they could."""
    body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
    api.engine.paused.set()
    with api.raw() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            received += connection.recv(1 << 16) or b"\r\n\r\n"
        assert received.startswith(b"HTTP/1.1 200 OK")
        api.engine.paused.clear()
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 16) or b"0\r\n\r\n"
    assert received.count(b"HTTP/1.1") == 1
    assert b"[DONE]" in received


@pytest.mark.parametrize(
    "offer",
    [
        b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAMAAABkAAQAAP__\r\nUpgrade: h2c\r\n",
        b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n",
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_an_offer_of_another_protocol_costs_no_body(api: Server, offer: bytes, apart: bool) -> None:
    body = b'{"prompt": "\\nupgrade: x", "max_tokens": 3}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n" % (offer, len(body))
    with api.raw() as connection:
        for _ in range(2):  # the connection stays as it was
            connection.sendall(head + b"\r\n" + (b"" if apart else body))
            if apart:
                time.sleep(0.05)  # so that the body comes in a packet of its own
                connection.sendall(body)
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(1 << 16) or b"}"
            assert received.startswith(b"HTTP/1.1 200 OK")
            assert b'"completion_tokens":3' in received


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_idle_connections_do_no_harm(api: Server, count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 500:
        count = hard - 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 500)), hard))
    connections: list[socket.socket] = []
    try:
        before = rss_bytes(api)
        connections += [api.raw() for _ in range(count)]
        assert ask(api) == "hello"
        assert (rss_bytes(api) - before) / count < 32 * 1024, "an idle connection costs little"
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    api.wait_for(lambda: open_files(api) < 100)
    assert ask(api) == "hello"


def test_bodies_without_end_share_bounded_memory(api: Server) -> None:
    """What many clients send of large bodies at once is refused beyond a total; ordinary requests are served."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    part = b"x" * (15 << 20)
    count = 30
    assert ask(api) == "hello"
    before = rss_bytes(api)
    with contextlib.ExitStack() as stack:
        refused = 0
        for _ in range(count):
            connection = stack.enter_context(api.raw())
            connection.sendall(head % (16 << 20) + part)
            connection.settimeout(0.3)
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(1 << 16)
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1" in answer.lower()
                assert b"retry later" in answer
                refused += 1
        assert refused >= count - RECEIVED_BYTES // len(part) - 2
        assert rss_bytes(api) - before < 1.5 * RECEIVED_BYTES
        assert ask(api) == "hello"
    with api.client() as client:  # all of it is free again
        api.wait_for(lambda: client.post("/v1/completions", content=part).json()["error"]["code"] == "invalid_json")


def ask_health(connection: socket.socket) -> None:
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    received = b""
    while not received.endswith(b'{"status":"ok"}'):
        data = connection.recv(4096)
        assert data, received
        received += data


def test_out_of_file_descriptors(api: Server) -> None:
    """New connections are turned away; those that are there are served; it recovers by itself."""
    with api.raw() as kept, contextlib.ExitStack() as stack:
        ask_health(kept)
        limit = open_files(api) + 20
        resource.prlimit(api.api.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(60):
            stack.enter_context(api.raw())
        api.wait_for(lambda: open_files(api) >= limit - 2)
        ask_health(kept)
        before = cpu_seconds(api)
        with contextlib.suppress(TimeoutError):
            kept.settimeout(1.0)
            kept.recv(1)
        assert cpu_seconds(api) - before < 0.5, "it does not spin on what it cannot accept"
    api.wait_for(lambda: open_files(api) < limit - 10)
    assert ask(api) == "hello"


def test_bad_requests_do_not_fill_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stderr = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        server = Server(tmp_path)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    try:
        for _ in range(200):
            with server.raw() as connection:
                connection.sendall(b"no HTTP at all\r\n\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert ask(server) == "hello"
    finally:
        server.close()
    assert 1 <= log.read_text().count("Invalid HTTP request received.") <= 10


def rss_bytes(server: Server) -> int:
    return int(Path(f"/proc/{server.api.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


def open_files(server: Server) -> int:
    return len(list(Path(f"/proc/{server.api.process.pid}/fd").iterdir()))


def cpu_seconds(server: Server) -> float:
    fields = Path(f"/proc/{server.api.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
