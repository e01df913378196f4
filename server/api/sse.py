"""Server-sent events past ASGI's channel: few allocations per token, bounded buffering per client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor

from starlette.types import Receive, Scope, Send

from server.api.chunks import EventWriter
from server.api.errors import ApiError
from server.api.exchange import Exchange
from server.api.generation import INLINE_POSITIONS, Delta, Generation

DONE = b"data: [DONE]\n\n"
STALL_LIMIT_S = 30.0
"""How long a client may take nothing while there is something to send."""
MAX_UNSENT_TOKENS = 8192
"""How far a client may fall behind its generation."""
_CHECK_INTERVAL_S = 1.0
_HEADERS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


class EventStream:
    """An answer that writes the deltas of a generation as SSE events, as they come.

    While the client's socket takes what it is given, a step's event goes from the engine's message straight into the
    transport: text alone through `Sequence.emit`, anything else through `_write_now`. Otherwise the handler waits until
    the socket has room (backpressure is the transport's), and what is generated meanwhile becomes one event. A failed
    generation ends in an error event.
    """

    def __init__(
        self,
        generation: Generation,
        writer: EventWriter,
        streams: EventStreams,
        *,
        begin: Callable[[Exchange], None],
        end: Callable[[Exchange], None],
        thread: Executor,
    ) -> None:
        """`begin` puts the generation into the engine; `end`, called whatever happens, takes out what is left of it.
        `thread` writes what takes long."""
        self.generation = generation
        self._writer = writer
        self._streams = streams
        self._begin = begin
        self._end = end
        self._thread = thread
        self._exchange: Exchange | None = None
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self.generation
        exchange: Exchange = scope["state"]["exchange"]
        self._exchange = exchange
        self._streams.add(self)
        try:
            try:
                self._begin(exchange)
                exchange.start(_HEADERS)
                generation.sink = self._write_now
                while deltas := await generation.next():
                    self._sending_since = time.monotonic()
                    await exchange.writable()
                    self._sending_since = None
                    if sum(delta.num_positions for delta in deltas) > INLINE_POSITIONS:
                        loop = asyncio.get_running_loop()
                        exchange.write(await loop.run_in_executor(self._thread, self._writer.write, deltas))
                    else:
                        self._write(exchange, deltas)
                end = self._writer.last() + DONE
            except ApiError as error:
                end = error_event(error)
            finally:
                generation.sink = None
                self._end(exchange)
            await exchange.writable()
            exchange.finish(end)
        finally:
            self._streams.discard(self)

    def _write_now(self) -> bool:
        """Write what is new without waiting; False when the client's socket is full, or it takes long."""
        exchange = self._exchange
        if exchange is None or not exchange.is_writable or self.generation.num_untaken_positions > INLINE_POSITIONS:
            return False
        self._write(exchange, self.generation.take())
        return True

    def _write(self, exchange: Exchange, deltas: list[Delta]) -> None:
        exchange.write(self._writer.write(deltas))
        for delta in deltas:
            sequence = self.generation.sequences[delta.index]
            if sequence.emit is None and sequence.is_plain and (frame := self._writer.frame(delta.index)) is not None:
                sequence.emit = exchange.text_writer(*frame)

    def is_stalled(self, now: float) -> bool:
        return self._sending_since is not None and (
            now - self._sending_since > STALL_LIMIT_S or self.generation.num_untaken_tokens > MAX_UNSENT_TOKENS
        )

    def cut(self) -> None:
        """Drop the connection with what is buffered for it; a closed one would wait for its reader for ever."""
        if self._exchange is not None:
            self._exchange.abort()


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
