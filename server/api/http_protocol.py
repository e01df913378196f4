"""uvicorn's HTTP protocol, with a deadline for request headers and access to the transport."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEADER_TIMEOUT_S = 30.0
"""From the first byte of a connection or request to the end of its headers."""


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
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arm()

    def on_headers_complete(self) -> None:
        self._disarm()
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.scope["state"]["body_writer"] = BodyWriter(self.cycle, self.flow, self.transport)

    def _arm(self) -> None:
        # A connection that sends nothing, or its headers byte by byte, must not stay for ever.
        self._disarm()
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
