"""HTTP/1.1 connections of the load path: one request at a time, no coroutine and no task per event.

aiohttp's client hands a body through a StreamReader to a waiting coroutine: at one event per read that is a future, a
callback and a task switch each, some 17 us an event on one core. Here the bytes of a read go from the transport through
llhttp (httptools) and the event parser within one call, and are stamped before anything else is done with them.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, cast

import httptools

from benchctl.loadgen.chunks import error_message
from benchctl.loadgen.records import Cause
from benchctl.loadgen.stream import AnswerStream
from benchctl.loadgen.transport import SocketTransport

_EVENT_STREAM = "text/event-stream"
_MAX_ERROR_BODY = 64 * 1024
_END_GRACE_S = 1.0
"""How long after `[DONE]` the end of the HTTP message may take before the connection is given up."""
_STALE_AFTER_NS = 1_000_000_000
"""A server may close a connection that has idled; a request that meets this is sent again on a fresh one."""


class Flight:
    """One request from its preparation to its end."""

    __slots__ = (
        "answer",
        "attempts",
        "body",
        "deadline_ns",
        "detail",
        "end_ns",
        "http_status",
        "index",
        "ready_ns",
        "request",
        "retry_after_s",
        "scheduled_ns",
        "sent_ns",
        "slot",
    )

    def __init__(self, index: int, request: object, body: bytes, *, scheduled_ns: int, ready_ns: int) -> None:
        self.index = index
        self.request = request
        self.body = body
        self.scheduled_ns = scheduled_ns
        self.ready_ns = ready_ns
        self.sent_ns = 0
        self.end_ns = 0
        self.deadline_ns = 0
        self.attempts = 0
        self.http_status = 0
        self.detail = ""
        self.retry_after_s: float | None = None
        self.answer = AnswerStream()


class Owner(Protocol):
    """Hears what becomes of connections and the flights on them."""

    def connection_idle(self, connection: Connection) -> None:
        """It may take the next request."""

    def connection_lost(self, connection: Connection) -> None:
        """It is closed; whatever it carried was reported before."""

    def flight_ended(self, flight: Flight, cause: Cause, now_ns: int) -> None:
        """An attempt is over. Called after the connection went idle or was lost."""

    def flight_stale(self, flight: Flight) -> None:
        """The server had closed the idle connection before the request reached it: nothing was answered."""


class Connection(asyncio.Protocol):
    """One connection; `send` when it is idle."""

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._flight: Flight | None = None
        self._answer: AnswerStream | None = None
        self._now = 0
        self._idle_since_ns = time.monotonic_ns()
        self._used = False
        self._got_bytes = False
        self._complete = False
        self._framed = False
        self._keep_alive = True
        self._status = 0
        self._content_type = ""
        self._error_body = bytearray()
        self._grace: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport | SocketTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # both have what is used of it

    def data_received(self, data: bytes) -> None:
        self._now = now_ns = time.monotonic_ns()
        flight = self._flight
        if flight is None:
            self.abort()  # nothing was asked
            return
        self._got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            if not (self._answer is not None and self._answer.done):
                flight.detail = f"not an HTTP answer ({error})"
                self._drop(Cause.BAD_HTTP, now_ns)
                return
            self._drop(Cause.OK, now_ns)
            return
        if self._complete:
            self._end_message(flight, now_ns)
        elif (answer := self._answer) is not None and (answer.done or answer.cause):
            if answer.cause is Cause.BAD_STREAM:
                self._drop(answer.cause, now_ns)
            elif self._grace is None:
                flight.end_ns = now_ns
                self._grace = self._loop.call_later(_END_GRACE_S, self._drop_after_grace)

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_grace()
        flight, answer = self._flight, self._answer
        self._flight = self._answer = None
        self._owner.connection_lost(self)
        if flight is None:
            return
        now_ns = time.monotonic_ns()
        if not self._got_bytes:
            if self._used and flight.sent_ns - self._idle_since_ns > _STALE_AFTER_NS:
                self._owner.flight_stale(flight)
                return
            flight.detail = str(exc) if exc else "the server closed the connection without an answer"
            self._owner.flight_ended(flight, Cause.RESET, now_ns)
        elif answer is None:
            flight.detail = flight.detail or (str(exc) if exc else "the connection closed within the answer's headers")
            cause = Cause.HTTP if self._status >= 300 else Cause.RESET
            self._owner.flight_ended(flight, cause, now_ns)
        else:
            self._end_by_close(flight, answer, exc, now_ns)

    # --- llhttp ---

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True
        elif name == b"content-type":
            self._content_type = value.decode("latin-1").partition(";")[0].strip().lower()
        elif name == b"retry-after" and self._flight is not None and value.strip().isdigit():
            self._flight.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        self._status = status = self._parser.get_status_code()
        if self._flight is not None and status >= 200:
            self._flight.http_status = status
            if status == 200:
                self._answer = self._flight.answer

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(body, self._now)
        elif len(self._error_body) < _MAX_ERROR_BODY:
            self._error_body += body

    def on_message_complete(self) -> None:
        self._complete = self._status >= 200
        self._keep_alive = self._parser.should_keep_alive()

    # --- the owner's side ---

    @property
    def is_open(self) -> bool:
        """False from the moment at which the end of the connection is known; `connection_lost` comes a little later."""
        return not self._transport.is_closing()

    def send(self, flight: Flight) -> None:
        """Write the request; `sent_ns` is taken when the kernel has its bytes (or, for TLS, the transport)."""
        self._flight = flight
        self._got_bytes = self._complete = self._framed = False
        self._status = 0
        self._content_type = ""
        flight.attempts += 1
        self._transport.write(flight.body)
        now_ns = time.monotonic_ns()
        if flight.sent_ns == 0:
            flight.sent_ns = now_ns

    def expire(self) -> None:
        """The flight's time is up."""
        done = self._answer is not None and self._answer.done
        self._drop(Cause.OK if done else Cause.TIMEOUT, time.monotonic_ns())

    def abort(self) -> None:
        """Close at once; a flight on it is forgotten."""
        self._flight = self._answer = None
        self._transport.abort()

    # --- ends ---

    def _end_message(self, flight: Flight, now_ns: int) -> None:
        self._stop_grace()
        answer, status = self._answer, self._status
        self._flight = self._answer = None
        if flight.end_ns == 0:
            flight.end_ns = now_ns
        if answer is not None:
            answer.close(now_ns)
            cause, flight.detail = self._judge(answer)
        else:
            cause = Cause.HTTP
            flight.detail = error_message(bytes(self._error_body))
            self._error_body.clear()
        self._used = True
        self._idle_since_ns = now_ns
        if self._keep_alive and status != 101 and not self._transport.get_write_buffer_size():
            self._owner.connection_idle(self)
        else:
            self._transport.close()
        self._owner.flight_ended(flight, cause, now_ns)

    def _end_by_close(self, flight: Flight, answer: AnswerStream, exc: Exception | None, now_ns: int) -> None:
        if flight.end_ns == 0:
            flight.end_ns = now_ns
        if exc is None and not self._framed:
            answer.close(now_ns)  # a body without a length ends with its connection
        cause, flight.detail = self._judge(answer)
        if not answer.done and not cause and (self._framed or exc is not None):
            cause = Cause.TRUNCATED if exc is None else Cause.RESET
            flight.detail = str(exc) if exc else "the connection closed within the answer"
        self._owner.flight_ended(flight, cause, now_ns)

    def _judge(self, answer: AnswerStream) -> tuple[Cause, str]:
        """How an answer ended, and why: one that is no stream was not cut off."""
        if answer.cause is Cause.TRUNCATED and not answer.times and self._content_type not in ("", _EVENT_STREAM):
            return Cause.BAD_STREAM, f"answered with {self._content_type} instead of {_EVENT_STREAM}"
        return answer.cause, answer.detail

    def _drop_after_grace(self) -> None:
        self._grace = None
        if self._answer is not None:
            self._drop(self._answer.cause, time.monotonic_ns())

    def _drop(self, cause: Cause, now_ns: int) -> None:
        flight, answer = self._flight, self._answer
        self._stop_grace()
        self.abort()
        if flight is not None:
            if flight.end_ns == 0:
                flight.end_ns = now_ns
            if answer is not None and not flight.detail:
                flight.detail = answer.detail
            self._owner.flight_ended(flight, cause, now_ns)

    def _stop_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
