"""uvicorn's HTTP protocol, with bounds on what a client can hold up or pile up, and a shorter way to its answers."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.api.exchange import Exchange

HEADER_TIMEOUT_S = 30.0
"""From the first byte of a connection or request to the end of its headers; also from an answer that came before the
end of its request's body to that end."""
MAX_HEADER_BYTES = 64 * 1024
"""Names and values of a request's headers and its URL (h11's bound). Of headers that do not end, and of trailers, the
first read of the request (256 KiB at most) is not counted."""
READ_STALL_S = 30.0
"""How long a client may read nothing while there is more for it than the transport's buffer holds."""
# Bytes on the wire per byte of body: a chunk of one byte travels in six.
_MAX_FRAMING = 8
_MESSAGE = b"The headers of the request are too large."
_HEADERS_TOO_LARGE_ANSWER = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_MESSAGE), _MESSAGE)
)


class _HeadersTooLarge(Exception):
    """Ends the parsing of a request."""


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
        self._is_silent = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # uvicorn also asks for the addresses of both ends, which nothing here needs: four system calls.
        self.connections.add(self)
        self.transport = transport
        self.flow = FlowControl(transport)
        self.scheme = "http"
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._disarm_stall()
        # With pipelining uvicorn tells only the last request that it parsed, not the one that is being answered.
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
            self._active.scope["state"]["exchange"].gone()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        message = self._messages
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._messages != message or not self._in_message:
            return
        # All of `data` belongs to one message that goes on.
        self._message_bytes += len(data)
        if self._message_bytes > MAX_HEADER_BYTES + _MAX_FRAMING * self._body_bytes:
            self._refuse_headers()

    def _feed(self, data: bytes) -> None:
        """Parse `data`, in which any request may offer to go on in another protocol.

        Such an offer may be ignored (Java's client makes one with every request, of HTTP/2), but the parser does not:
        it ends the request at its headers, and takes what follows for the other protocol.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                if framing := self._framing():
                    self._expect_body(framing)
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, _HeadersTooLarge):
                    self._refuse_headers()
                    return
                message = "Invalid HTTP request received."
                self.logger.warning(message)
                self.send_400_response(message)
                return

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP. Requests before it on the connection are answered first, and then it is closed."""
        active = self._active
        if active is None or active.response_complete or (active.more_body and not active.response_started):
            super().send_400_response(msg)
        elif active.more_body:  # the body of a request whose answer is under way
            self.transport.abort()
        else:
            if self.pipeline and self.pipeline[0][0].more_body:  # the last one has no end
                self.pipeline.popleft()
            last = self.pipeline[0][0] if self.pipeline else active
            last.keep_alive = False

    def _framing(self) -> bytes:
        """The headers of the request that say where its body ends; empty when it has none."""
        lines = []
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0")):
                lines.append(b"%b: %b\r\n" % (name, value))
        return b"".join(lines)

    def _expect_body(self, framing: bytes) -> None:
        """Go on with a parser that has read the headers of a request with such a body, and made no offer."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.headers = []  # those of the request are in its scope
        self._is_silent = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        self._is_silent = False

    def _refuse_headers(self) -> None:
        if self.transport.is_closing():
            return
        if self._active is None or self._active.response_complete:
            self.transport.write(_HEADERS_TOO_LARGE_ANSWER)
            self.transport.close()
        else:  # an answer is under way on this connection
            self.transport.abort()

    def on_message_begin(self) -> None:
        if self._is_silent:
            return
        super().on_message_begin()
        self._messages += 1
        self._message_bytes = self._body_bytes = 0
        self._in_message = True
        self._arm()

    def on_headers_complete(self) -> None:
        if self._is_silent:
            return
        if len(self.url) + sum([len(name) + len(value) for name, value in self.headers]) > MAX_HEADER_BYTES:
            raise _HeadersTooLarge
        self._disarm()
        super().on_headers_complete()
        if self.cycle is not None:
            exchange = Exchange(self.cycle, self.flow, self.transport, self.server_state)
            self.cycle.scope["state"]["exchange"] = exchange

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():  # its body is still to come
            return
        self._in_message = False
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
