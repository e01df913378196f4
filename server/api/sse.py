"""Server-sent events on a raw ASGI channel: few allocations per token, bounded buffering per client."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.api.chunks import EventWriter
from server.api.errors import ApiError
from server.api.generation import Generation
from server.api.http_protocol import BodyWriter

DONE = b"data: [DONE]\n\n"
STALL_LIMIT_S = 30.0
"""How long a client may take nothing while there is something to send."""
MAX_UNSENT_TOKENS = 8192
"""How far a client may fall behind its generation."""
_CHECK_INTERVAL_S = 1.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


class EventStream(Response):
    """An answer that writes the deltas of a generation as SSE events, as they come.

    While the client's socket takes what it is given, a step's event goes from the engine's message straight into the
    transport (`_write_now`). Otherwise the handler waits in `send` until it does (backpressure is the transport's),
    and what is generated meanwhile becomes one event. A failed generation ends in an error event.
    """

    def __init__(
        self,
        running: AbstractAsyncContextManager[Generation],
        generation: Generation,
        writer: EventWriter,
        streams: EventStreams,
    ) -> None:
        """`running`: the generation is in the engine while it is entered."""
        super().__init__()
        self.generation = generation
        self._running = running
        self._writer = writer
        self._streams = streams
        self._body: BodyWriter | None = None
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self.generation
        state = scope["state"]
        # The server's own channel: the framework wraps `send` in three coroutines that a token need not go through.
        send = state.get("raw_send", send)
        self._body = state.get("body_writer")
        self._streams.add(self)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                async with self._running:
                    if self._body is not None:
                        generation.sink = self._write_now
                    while deltas := await generation.next():
                        self._sending_since = time.monotonic()
                        await send(_body(self._writer.write(deltas), more=True))
                        self._sending_since = None
                end = self._writer.last() + DONE
            except ApiError as error:
                end = error_event(error)
            await send(_body(end, more=False))
        finally:
            generation.sink = None
            self._streams.discard(self)

    def _write_now(self) -> bool:
        """Write what is new without waiting; False when the client's socket is full."""
        body = self._body
        if body is None or not body.is_writable:
            return False
        body.write(self._writer.write(self.generation.take()))
        return True

    def is_stalled(self, now: float) -> bool:
        return self._sending_since is not None and (
            now - self._sending_since > STALL_LIMIT_S or self.generation.num_untaken_tokens > MAX_UNSENT_TOKENS
        )

    def cut(self) -> None:
        """Drop the connection with what is buffered for it; a closed one would wait for its reader for ever."""
        if self._body is not None:
            self._body.abort()


class EventStreams:
    """The streams of this process; cuts those whose client has stopped reading."""

    def __init__(self) -> None:
        self._active: set[EventStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, stream: EventStream) -> None:
        self._active.add(stream)
        self._idle.clear()

    def discard(self, stream: EventStream) -> None:
        self._active.discard(stream)
        if not self._active:
            self._idle.set()

    async def ended(self) -> None:
        """Wait until there is none."""
        await self._idle.wait()

    async def watch(self) -> None:
        """Check for ever."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            now = time.monotonic()
            for stream in [stream for stream in self._active if stream.is_stalled(now)]:
                stream.cut()
