"""Server-sent events out of bytes that arrive in any portions.

Follows the WHATWG algorithm (https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream) on
bytes: only LF, CR and CRLF end a line, so U+2028 and the other "line separators" of Unicode may stand in JSON. One
deviation: an event that the end of the stream cuts off before its blank line is delivered (`close`), as some servers
leave the last blank line out.
"""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 8 * 1024 * 1024
_SMALL = 64 * 1024
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class SseError(Exception):
    """The stream cannot be read on."""


class Event(bytes):
    """Data of an event that has a type other than `message`."""

    type: bytes


class SseParser:
    """Incremental parser of one stream.

    `feed` gives the data of every event that its bytes complete: plain `bytes`, or an `Event` for one with an
    `event:` field. Memory is bounded by `max_event_bytes`; more raises `SseError`.
    """

    __slots__ = ("_buffer", "_data", "_max", "_scanned", "_size", "_skip_lf", "_started", "_type")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._buffer = bytearray()
        """Bytes after the last line end (or, on the fast path, after the last event)."""
        self._scanned = 0
        """Length of the buffer's head that holds no line end."""
        self._data: list[bytes] = []
        self._size = 0
        self._type = b""
        self._skip_lf = False
        self._started = False

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, in order."""
        if self._data or self._skip_lf or self._type or self._scanned:
            return self._feed_lines(data)
        if self._buffer:
            if len(self._buffer) > _SMALL:
                return self._feed_lines(data)
            data = bytes(self._buffer) + data
            self._buffer.clear()
        # Nearly all streams are `data: {...}\n\n` and nothing else: the newlines tell whether these bytes are.
        if data.startswith(b"data: ") and b"\r" not in data:
            if data.endswith(b"\n\n"):
                whole = data
                rest = b""
            else:
                end = data.rfind(b"\n\n") + 2
                if end == 1:
                    return self._feed_lines(data)
                whole = data[:end]
                rest = data[end:]
            events = whole[6:-2].split(b"\n\ndata: ")
            if whole.count(b"\n") == 2 * len(events):
                self._started = True
                self._buffer += rest
                if len(rest) > self._max:
                    raise SseError(f"an event is larger than {self._max} bytes")
                return events
        return self._feed_lines(data)

    def close(self) -> list[bytes]:
        """The event that the end of the stream completes, if any."""
        events = self._feed_lines(b"")
        if self._buffer:
            self._line(bytes(self._buffer), events)
            self._buffer.clear()
        self._line(b"", events)
        return events

    def _feed_lines(self, data: bytes) -> list[bytes]:
        if self._skip_lf and data:
            self._skip_lf = False
            if data[0] == 10:
                data = data[1:]
        buffer = self._buffer
        buffer += data
        events: list[bytes] = []
        if not self._started:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                return events
            if buffer.startswith(_BOM):
                del buffer[: len(_BOM)]
            self._started = True
        start = 0
        for match in _LINE_END.finditer(buffer, self._scanned):
            self._line(bytes(buffer[start : match.start()]), events)
            start = match.end()
            # A CR at the very end may be half of a CRLF: the line is complete, a following LF belongs to it.
            self._skip_lf = start == len(buffer) and buffer[start - 1] == 13
        del buffer[:start]
        self._scanned = len(buffer)
        if len(buffer) + self._size > self._max:
            raise SseError(f"an event is larger than {self._max} bytes")
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                self._dispatch(events)
            self._type = b""
            return
        name, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if name == b"data":
            self._data.append(value)
            self._size += len(value) + 1
        elif name == b"event":
            self._type = value

    def _dispatch(self, events: list[bytes]) -> None:
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data.clear()
        self._size = 0
        if self._type in (b"", b"message"):
            events.append(data)
        else:
            event = Event(data)
            event.type = self._type
            events.append(event)
