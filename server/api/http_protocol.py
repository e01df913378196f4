"""uvicorn's HTTP protocol, with bounds on what a client can hold up or pile up, and access to the transport."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEADER_TIMEOUT_S = 30.0
"""From the first byte of a connection or request to the end of its headers; also from an answer that came before the
end of its request's body to that end."""
MAX_HEADER_BYTES = 64 * 1024
"""Headers, request line and trailers of one request (h11's bound). The first read of a request is not counted, so up to
256 KiB more can pass."""
READ_STALL_S = 30.0
"""How long a client may read nothing while there is more for it than the transport's buffer holds."""
# Bytes on the wire per byte of body: a chunk of one byte travels in six.
_MAX_FRAMING = 8
_UPGRADE = re.compile(rb"\nupgrade(?=:)", re.IGNORECASE)
_MESSAGE = b"The headers of the request are too large."
_HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_MESSAGE), _MESSAGE)
)


class BodyWriter:
    """Writes parts of a response's body without waiting, framed as uvicorn's own `send` frames them.

    For answers of unknown length, between their `http.response.start` and last `http.response.body` messages. This is
    what a token of a stream costs least with: no coroutine, no task switch.
    """

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl, transport: asyncio.Transport) -> None:
        self._cycle = cycle
        self._flow = flow
        self._transport = transport

    @property
    def is_writable(self) -> bool:
        """Whether the answer is a chunked one under way and the client's socket has room."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (self._flow.write_paused or cycle.disconnected)

    def write(self, data: bytes) -> None:
        """Only when `is_writable`; `data` must not be empty (an empty chunk ends a body)."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """Drop the connection with everything buffered for it."""
        self._transport.abort()


class HttpProtocol(HttpToolsProtocol):
    """Adds to uvicorn's: bounds on headers (size and time), on clients that do not read, and on bodies that nobody
    asked for; and that every request of a connection hears when its client is gone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._active: RequestResponseCycle | None = None
        self._messages = 0
        self._message_bytes = 0
        self._body_bytes = 0
        self._in_message = False
        self._in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._disarm_stall()
        # With pipelining uvicorn tells only the last request that it parsed, not the one that is being answered.
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        message = self._messages
        if self._in_headers:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._messages != message or not self._in_message:
            return
        # All of `data` belongs to one message that goes on.
        self._message_bytes += len(data)
        if self._message_bytes > MAX_HEADER_BYTES + _MAX_FRAMING * self._body_bytes:
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        if self.transport.is_closing():
            return
        if self._active is None or self._active.response_complete:
            self.transport.write(_HEADERS_TOO_LARGE)
            self.transport.close()
        else:  # an answer is under way on this connection
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._messages += 1
        self._message_bytes = self._body_bytes = 0
        self._in_message = self._in_headers = True
        self._arm()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._disarm()
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.scope["state"]["body_writer"] = BodyWriter(self.cycle, self.flow, self.transport)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._in_headers = False, True
        if self.cycle is not None and self.cycle.response_complete:
            self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # An answer that did not wait for the request's body: the rest is thrown away, but must end some time.
        if self._in_message and self.cycle.response_complete and not self.transport.is_closing():
            self._arm()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._disarm_stall()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait for a client that does not read
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _watch_reader(self) -> None:
        """Drop the connection unless its client has read something by then; ask again if it has."""
        self._disarm_stall()
        self._unsent = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(READ_STALL_S, self._on_stall)

    def _on_stall(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_reader()
        else:
            self.transport.abort()

    def _arm(self) -> None:
        # A connection that sends nothing, or its headers byte by byte, must not stay for ever.
        self._disarm()
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _disarm_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def _without_upgrade(data: bytes) -> bytes:
    """`data`, which begins within a request's headers, with the offer of another protocol made out.

    The parser takes what follows such headers for the other protocol, and a body is lost; who offers to go on in
    HTTP/2 (Java's client does, with every request) may be answered as if it had not.
    """
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    if _UPGRADE.search(head) is None:
        return data
    return _UPGRADE.sub(b"\nx-upgrade", head) + data[len(head) :]
