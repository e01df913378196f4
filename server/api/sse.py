"""Server-sent events on a raw ASGI channel: few allocations per token, bounded buffering per client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.errors import ApiError
from server.api.generation import Generation

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


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


class EventStream(Response):
    """An answer whose body is `events`, chunks of whole SSE events, written as they come.

    Backpressure is the transport's: `send` waits while the client's socket is full, and what is generated meanwhile
    becomes one event. An ApiError from `events` ends the stream with an error event.
    """

    def __init__(self, events: AsyncIterator[bytes], generation: Generation, streams: EventStreams) -> None:
        super().__init__()
        self.generation = generation
        self.sending_since: float | None = None
        self._events = events
        self._streams = streams
        self._transport: asyncio.Transport | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        # The server's own channel: the framework wraps `send` in three coroutines that a token need not go through.
        send = state.get("raw_send", send)
        self._transport = state.get("transport")
        self._streams.add(self)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                async for data in self._events:
                    self.sending_since = time.monotonic()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self.sending_since = None
                end = DONE
            except ApiError as error:
                end = error_event(error)
            await send({"type": "http.response.body", "body": end, "more_body": False})
        finally:
            self._streams.discard(self)

    def is_stalled(self, now: float) -> bool:
        return self.sending_since is not None and (
            now - self.sending_since > STALL_LIMIT_S or self.generation.num_untaken_tokens > MAX_UNSENT_TOKENS
        )

    def cut(self) -> None:
        """Drop the connection with what is buffered for it; a closed one would wait for its reader for ever."""
        if self._transport is not None:
            self._transport.abort()


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
