"""The mock server: one process, one loop, a write per step and stream, no coroutine on the way of an event."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import socket
import struct
import time
from pathlib import Path
from typing import IO, cast

import httptools
import msgspec

from benchctl.loadgen.timer import DeadlineTimer
from benchctl.mock.answers import END, HEAD, AnswerBytes, Asked, chunk, decode_request, plain
from benchctl.mock.script import Failure, MockOptions, check_options
from server.errors import UserError

_OVERLOADED = b'{"error":{"message":"the mock is told to fail","type":"server_error","param":null,"code":503}}'
_ERROR_EVENT = b'data: {"error":{"message":"the mock is told to fail","type":"server_error","code":500}}\n\n'


class AnswerLog(msgspec.Struct):
    """One line of the log; times are CLOCK_MONOTONIC ns, taken before the write."""

    id: str
    """The request's X-Request-Id header."""
    received_ns: int
    """When the request was complete."""
    writes_ns: list[int] = []
    events: list[int] = []
    """Token events in each write."""
    failed: str | None = None


class MockServer:
    """Serves until `close`; `url` is known after `start`."""

    def __init__(self, options: MockOptions) -> None:
        """Raises UserError for options that make no script or a log that cannot be written."""
        check_options(options)
        self.options = options
        self.requests = 0
        self.accepted = 0
        """Connections so far."""
        self.url = ""
        self.answers = {
            chat: AnswerBytes(
                chat=chat, tokens_per_event=options.tokens_per_event, events_per_write=options.events_per_write
            )
            for chat in (False, True)
        }
        self.stalls_ns: dict[int, int] = {}
        for stall in options.stalls:
            self.stalls_ns[stall.event] = self.stalls_ns.get(stall.event, 0) + int(stall.seconds * 1e9)
        self._log: IO[bytes] | None = None
        self._entries: list[AnswerLog] = []
        if options.log is not None:
            try:
                self._log = Path(options.log).open("wb")  # noqa: SIM115 (open as long as the server)
            except OSError as error:
                raise UserError(f"--log {options.log}: {error.strerror}") from None
        self._ready: list[AnswerWriter] = []
        """Streams that write in every step."""
        self._due: list[tuple[int, int, AnswerWriter]] = []
        self._sequence = 0
        self._stepping = False
        self.connections: set[MockProtocol] = set()

    async def start(self) -> None:
        """Listen. Raises UserError when the address is taken."""
        self.loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self.loop, self._step)
        try:
            self._server = await self.loop.create_server(
                lambda: MockProtocol(self), self.options.host, self.options.port, backlog=4096
            )
        except OSError as error:
            self._timer.close()
            if self._log is not None:
                self._log.close()
            raise UserError(
                f"cannot listen on {self.options.host}:{self.options.port}: {error.strerror or error}"
            ) from None
        port = self._server.sockets[0].getsockname()[1]
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        self._server.close()
        self._ready.clear()
        self._due.clear()
        for connection in list(self.connections):
            connection.transport.abort()
        await self._server.wait_closed()
        self._timer.close()
        if self._log is not None:
            with self._log as file:
                file.writelines(msgspec.json.encode(entry) + b"\n" for entry in self._entries)

    def failure_of(self, number: int) -> Failure | None:
        return next((failure for failure in self.options.failures if number % failure.every == 0), None)

    def log(self, entry: AnswerLog) -> None:
        """Note an answer; written at `close`, so that writing it delays no stream."""
        if self._log is not None:
            self._entries.append(entry)

    def write_at(self, due_ns: int, writer: AnswerWriter) -> None:
        """Have `writer` write at `due_ns`, or in the next step when that is not in the future."""
        if due_ns <= time.monotonic_ns():
            self.write_soon(writer)
            return
        self._sequence += 1
        heapq.heappush(self._due, (due_ns, self._sequence, writer))
        self._timer.arm(self._due[0][0])

    def write_soon(self, writer: AnswerWriter) -> None:
        self._ready.append(writer)
        if not self._stepping:
            self._stepping = True
            self.loop.call_soon(self._step_again)

    def _step_again(self) -> None:
        self._stepping = False
        self._step()

    def _step(self) -> None:
        """One write of every stream that is due, in the order in which they became due."""
        now_ns = time.monotonic_ns()
        while self._due and self._due[0][0] <= now_ns:
            self._ready.append(heapq.heappop(self._due)[2])
        ready, self._ready = self._ready, []
        for writer in ready:
            writer.write()
        if self._ready and not self._stepping:
            self._stepping = True
            self.loop.call_soon(self._step_again)
        if self._due:
            self._timer.arm(self._due[0][0])


class AnswerWriter:
    """One streamed answer."""

    __slots__ = (
        "_answers",
        "_asked",
        "_due_ns",
        "_entry",
        "_event",
        "_failure",
        "_left",
        "_protocol",
        "_server",
        "_simple",
    )

    def __init__(
        self, server: MockServer, protocol: MockProtocol, asked: Asked, *, chat: bool, entry: AnswerLog
    ) -> None:
        self._server = server
        self._protocol = protocol
        self._answers = server.answers[chat]
        self._asked = asked
        self._entry = entry
        self._failure = server.failure_of(server.requests)
        self._left = asked.output_tokens
        self._event = 0
        continuous = asked.stream_options is not None and asked.stream_options.continuous_usage_stats
        self._simple = not continuous and self._failure is None
        self._due_ns = entry.received_ns + int(server.options.ttft_s * 1e9) + server.stalls_ns.get(0, 0)

    def begin(self) -> None:
        self._server.write_at(self._due_ns, self)

    def write(self) -> None:
        """Write the next events, or the end, and ask for the next turn."""
        protocol = self._protocol
        if protocol.closed:
            return
        if protocol.paused:
            protocol.waiting = self
            return
        options = self._server.options
        head = HEAD if self._event == 0 else b""
        if self._simple and self._left > options.events_per_write * options.tokens_per_event:
            events = options.events_per_write
            data = head + self._answers.full_write if head else self._answers.full_write
            self._left -= events * options.tokens_per_event
        else:
            made = self._make_events()
            if made is None:
                return
            events, body = made
            data = head + body
        self._entry.writes_ns.append(time.monotonic_ns())
        self._entry.events.append(events)
        protocol.write(data)
        before = self._event
        self._event += events
        if self._left <= 0:
            self._server.log(self._entry)
            protocol.answer_ended()
            return
        self._wait(before, options)

    def _wait(self, before: int, options: MockOptions) -> None:
        server = self._server
        if not options.itl_s and not server.stalls_ns:
            server.write_soon(self)
            return
        stall = sum(server.stalls_ns.get(event, 0) for event in range(before + 1, self._event + 1))
        self._due_ns += int(options.itl_s * 1e9) + stall
        server.write_at(self._due_ns, self)

    def _make_events(self) -> tuple[int, bytes] | None:
        """The next write's events when they are not the usual ones; None when the answer has failed with it."""
        options, asked = self._server.options, self._asked
        include = asked.stream_options is not None and asked.stream_options.include_usage
        continuous = asked.stream_options is not None and asked.stream_options.continuous_usage_stats
        events: list[bytes] = []
        while self._left > 0 and len(events) < options.events_per_write:
            if self._failure is not None and self._event + len(events) >= self._failure.after:
                self._fail(self._failure, b"".join(events))
                return None
            tokens = min(options.tokens_per_event, self._left)
            self._left -= tokens
            usage = (asked.prompt_tokens, asked.output_tokens - self._left) if continuous else None
            events.append(self._answers.token_event(tokens, usage))
        count = len(events)
        if self._left <= 0:
            events.append(self._answers.last_events((asked.prompt_tokens, asked.output_tokens) if include else None))
        body = chunk(b"".join(events))
        return count, body + END if self._left <= 0 else body

    def _fail(self, failure: Failure, before: bytes) -> None:
        self._entry.failed = failure.kind
        self._server.log(self._entry)
        protocol = self._protocol
        if self._event == 0 and not before and failure.kind == "503":
            protocol.write(plain(b"503 Service Unavailable", _OVERLOADED))
            protocol.answer_ended()
            return
        head = HEAD if self._event == 0 else b""
        if failure.kind in ("error", "abort"):
            last = _ERROR_EVENT if failure.kind == "error" else self._answers.last_events(None, "abort")
            protocol.write(head + chunk(before + last) + END)
            protocol.answer_ended()
            return
        if failure.kind == "truncate":
            protocol.write(head + (chunk(before) if before else b""))
            protocol.transport.close()
            return
        if before:
            protocol.write(head + chunk(before))
        protocol.reset()


class MockProtocol(asyncio.Protocol):
    """One connection of a client."""

    transport: asyncio.Transport

    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()
        self._url = b""
        self._id = ""
        self._keep_alive = True
        self.closed = False
        self.paused = False
        self.waiting: AnswerWriter | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        self._fd = transport.get_extra_info("socket").fileno()
        self.transport.set_write_buffer_limits(high=0)
        self._server.connections.add(self)
        self._server.accepted += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._server.connections.discard(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.waiting is not None:
            self._server.write_soon(self.waiting)
            self.waiting = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.write(plain(b"400 Bad Request", b'{"error":{"message":"not HTTP"}}'))
            self.transport.close()

    def on_message_begin(self) -> None:
        self._body.clear()
        self._url, self._id = b"", ""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._keep_alive = self._parser.should_keep_alive()
        path = self._url.partition(b"?")[0]
        chat = path == b"/v1/chat/completions"
        if not chat and path != b"/v1/completions":
            self.write(_static(path))
            self.answer_ended()
            return
        received_ns = time.monotonic_ns()
        try:
            asked = decode_request(self._body)
        except msgspec.DecodeError as error:
            self.write(plain(b"400 Bad Request", msgspec.json.encode({"error": {"message": str(error)}})))
            self.answer_ended()
            return
        self._server.requests += 1
        if not asked.stream:
            body = self._server.answers[chat].whole(asked.output_tokens, asked.prompt_tokens)
            self.write(plain(b"200 OK", body))
            self.answer_ended()
            return
        AnswerWriter(self._server, self, asked, chat=chat, entry=AnswerLog(self._id, received_ns)).begin()

    def write(self, data: bytes) -> None:
        """Write now, past the transport's wait for the end of the loop's iteration."""
        if not self.paused:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # connection_lost follows
        if data:
            self.transport.write(data)

    def answer_ended(self) -> None:
        if not self._keep_alive:
            self.transport.close()

    def reset(self) -> None:
        """Close with a RST, as a process that dies with unread data does."""
        with contextlib.suppress(OSError):
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def _static(path: bytes) -> bytes:
    if path == b"/health":
        return plain(b"200 OK", b"{}")
    if path == b"/v1/models":
        return plain(b"200 OK", b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"benchctl"}]}')
    return plain(b"404 Not Found", b'{"error":{"message":"no such path"}}')
