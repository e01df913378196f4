"""One HTTP request and its answer, past ASGI's channel: what costs least per request and per token of a stream.

ASGI's `receive` and `send` are coroutines that validate every header and message again; a token of a stream needs one
write into the transport, and a request whose body is here already needs no wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

HEAD_DELAY_S = 0.1
"""How long the head of a stream may wait for its first event, to leave in one packet with it."""
_SIZE_LINES = [b"%x\r\n" % size for size in range(1024)]
_LAST_CHUNK = b"0\r\n\r\n"


def _size_line(size: int) -> bytes:
    return _SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size


class Exchange:
    """Belongs to one request-response cycle of uvicorn, whose state it keeps right."""

    __slots__ = ("_chunked", "_cycle", "_flow", "_head", "_head_timer", "_on_gone", "_server_state", "_transport")

    def __init__(
        self,
        cycle: RequestResponseCycle,
        flow: FlowControl,
        transport: asyncio.Transport,
        server_state: ServerState,
    ) -> None:
        self._cycle = cycle
        self._flow = flow
        self._transport = transport
        self._server_state = server_state
        self._on_gone: Callable[[], None] | None = None
        self._head = b""
        self._head_timer: asyncio.TimerHandle | None = None
        # HTTP/1.0 knows no chunks: there the end of the connection is the end of the body.
        self._chunked = cycle.scope["http_version"] != "1.0"

    def take_body(self) -> bytes | None:
        """The request's whole body if it is here, once; None: wait for it through ASGI's `receive`."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body = bytes(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        return body

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the client goes before the answer is complete; at once if it has gone already."""
        if self._cycle.disconnected:
            on_gone()
            return
        self._on_gone = on_gone
        # A connection that is not read says nothing of its end.
        self._flow.resume_reading()

    def unwatch(self) -> None:
        self._on_gone = None

    def gone(self) -> None:
        """The connection is lost."""
        self._cancel_head()
        if self._on_gone is not None:
            self._on_gone()

    @property
    def is_started(self) -> bool:
        """Whether an answer has begun, through here or through ASGI's `send`."""
        return self._cycle.response_started

    def start(self, headers: bytes) -> None:
        """Begin an answer of status 200 and unknown length; `headers` are whole lines.

        They leave with the first `write`, or after `HEAD_DELAY_S`.
        """
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        cycle.chunked_encoding = self._chunked
        if cycle.disconnected:
            return
        parts = [b"HTTP/1.1 200 OK\r\n"]
        parts += [b"%b: %b\r\n" % header for header in self._server_state.default_headers]
        parts.append(headers)
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n")
        self._head = b"".join(parts)
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_DELAY_S, self._write_head)

    def _write_head(self) -> None:
        self._transport.write(self._take_head())

    def _take_head(self) -> bytes:
        head = self._head
        self._cancel_head()
        return head

    def _cancel_head(self) -> None:
        self._head = b""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def is_writable(self) -> bool:
        """Whether the client is there and its socket has room."""
        return not (self._flow.write_paused or self._cycle.disconnected)

    async def writable(self) -> None:
        """Wait until the socket has room, or the client is gone."""
        if self._flow.write_paused and not self._cycle.disconnected:
            await self._flow.drain()

    def write(self, data: bytes) -> None:
        """Part of the body of a started answer, whether or not there is room; `data` must not be empty."""
        if self._cycle.disconnected:
            return
        if self._chunked:
            data = b"%b%b\r\n" % (_size_line(len(data)), data)
        self._transport.write(self._take_head() + data if self._head else data)

    def text_writer(self, before: bytes, after: bytes) -> Callable[[bytes], bool]:
        """A function that does `write(before + text + after)`, once something has been written.

        It does nothing and returns False when there is no room, or nobody to read it.
        """
        cycle, flow, write = self._cycle, self._flow, self._transport.write
        fixed = len(before) + len(after)
        sizes = _SIZE_LINES
        most = len(sizes) - fixed
        if self._chunked:
            after += b"\r\n"

            def write_text(text: bytes) -> bool:
                if flow.write_paused or cycle.disconnected:
                    return False
                length = len(text)
                size = sizes[fixed + length] if length < most else _size_line(fixed + length)
                write(b"".join((size, before, text, after)))
                return True

        else:

            def write_text(text: bytes) -> bool:
                if flow.write_paused or cycle.disconnected:
                    return False
                write(b"".join((before, text, after)))
                return True

        return write_text

    def finish(self, data: bytes) -> None:
        """The end of the body and with it of the answer."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        if self._chunked:
            data = b"%b%b\r\n%b" % (_size_line(len(data)), data, _LAST_CHUNK) if data else _LAST_CHUNK
        self._transport.write(self._take_head() + data)
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()

    def abort(self) -> None:
        """Drop the connection with everything buffered for it; a closed one would wait for its reader for ever."""
        self._transport.abort()
