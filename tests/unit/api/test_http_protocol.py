"""The deadline for request headers, and answers past ASGI's channel, in a server of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from server.api import http_protocol
from server.api.exchange import Exchange
from server.api.http_protocol import HttpProtocol
from server.listen import bind_socket


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    exchange: Exchange = scope["state"]["exchange"]
    if (body := exchange.take_body()) is None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
    exchange.start(b"x: y\r\n")
    exchange.write(b"written ")
    assert exchange.text_writer(b"<", b">")(b"text" * (1000 if scope["path"] == "/long" else 1))
    exchange.finish(b"end " + body)


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
        assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
        assert head.endswith(b"\r\nx: y\r\ntransfer-encoding: chunked\r\n\r\n")
        body = await reader.readuntil(b"0\r\n\r\n")
        assert body == b"8\r\nwritten \r\n6\r\n<text>\r\n4\r\nend \r\n0\r\n\r\n"
        await asyncio.sleep(0.4)
    writer.write(b"GET /long HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert b"\r\nfa2\r\n<texttext" in await reader.read()
    writer.close()


async def test_http_1_0_knows_no_chunks(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.0\r\ncontent-length: 4\r\n\r\nbody")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    assert body == b"written <text>end body"
    writer.close()


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAMAAABkAAQAAP__\r\nUpgrade: h2c\r\n"
PLAIN = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nplain"
OFFERING = b"POST / HTTP/1.1\r\nhost: x\r\n%bcontent-length: 5\r\n\r\noffer" % OFFER
CHUNKED = b"POST / HTTP/1.1\r\n%bhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nchu\r\n2\r\nnk\r\n0\r\n\r\n" % OFFER
WITHOUT = b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n" % OFFER
EMPTY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n%b\r\n" % OFFER


@pytest.mark.parametrize("size", [1 << 20, 7, 1])
async def test_offers_of_another_protocol_anywhere_cost_no_body(port: int, size: int) -> None:
    """Before, between and behind other requests, however the packets fall."""
    sent = [PLAIN, OFFERING, PLAIN, CHUNKED, OFFERING, WITHOUT, PLAIN, EMPTY, CHUNKED, PLAIN]
    data = b"".join(sent)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for start in range(0, len(data), size):
        writer.write(data[start : start + size])
        await asyncio.sleep(0)
    got = []
    for _ in sent:
        answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 20)
        got.append(answer.rpartition(b"end ")[2].partition(b"\r\n")[0])
    assert got == [b"plain", b"offer", b"plain", b"chunk", b"offer", b"", b"plain", b"", b"chunk", b"plain"]
    writer.close()


async def test_what_is_no_http_behind_an_offer_is_refused(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(WITHOUT)
    await reader.readuntil(b"0\r\n\r\n")
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()


BROKEN = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcdefgh\r\n"


@pytest.mark.parametrize("garbage", [b"no HTTP at all\r\n\r\n", BROKEN])
@pytest.mark.parametrize("valid", [1, 3])
async def test_requests_before_what_is_no_http_are_answered_first(port: int, valid: int, garbage: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PLAIN * valid + garbage)
    received = await asyncio.wait_for(reader.read(), 20)
    assert received.count(b"HTTP/1.1 200 OK") == received.count(b"end plain\r\n0\r\n\r\n") == valid
    assert received.count(b"connection: close") == 1
    assert received.endswith(b"end plain\r\n0\r\n\r\n"), "nothing in between or behind"
    writer.close()


async def test_a_broken_body_is_refused(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(BROKEN)
    received = await asyncio.wait_for(reader.read(), 20)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1
    writer.close()
