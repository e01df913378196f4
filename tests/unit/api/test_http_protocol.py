"""The deadline for request headers, in a server of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from server.api import http_protocol
from server.api.http_protocol import HttpProtocol
from server.listen import bind_socket


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    body = scope["state"]["body_writer"]
    if body.is_writable:
        body.write(b"written ")
    await send({"type": "http.response.body", "body": b"sent", "more_body": False})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.3)
    listener = bind_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = _Server(uvicorn.Config(_app, http=HttpProtocol, ws="none", lifespan="off", log_config=None))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        assert not task.done()
        await asyncio.sleep(0.01)
    yield port
    server.should_exit = True
    await task


async def test_connections_that_send_no_whole_headers_are_closed(port: int) -> None:
    silent, trickling = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    trickling[1].write(b"GET / HTTP/1.1\r\n")
    with contextlib.suppress(ConnectionError):
        while not trickling[0].at_eof():
            trickling[1].write(b"a: b\r\n")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(trickling[0].read(1), 0.05)
    with contextlib.suppress(ConnectionError):
        assert await silent[0].read() == b""
    for _, writer in (silent, trickling):
        writer.close()


async def test_answers_are_framed_and_a_kept_connection_outlives_the_deadline(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert await reader.readuntil(b"0\r\n\r\n") == b"8\r\nwritten \r\n4\r\nsent\r\n0\r\n\r\n"
        await asyncio.sleep(0.4)
    writer.close()
