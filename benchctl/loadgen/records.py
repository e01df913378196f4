"""Raw records of a load: every request's timestamps, in one compact file that is valid at any moment.

Format (little endian). The file starts with `MAGIC`, the length of a JSON object as u32, and that object: `version`,
`start_ns` (CLOCK_MONOTONIC at the start of the run), `workers` and whatever else the writer wants to say. Then follow
blocks, each appended in one piece by one worker:

    b"BLK1"  u32 rows  u32 events  u32 reserved   rows x ROW   events x EVENT

A ROW is one request, in the order in which requests ended; its token events are the next `n_events` of the block. Times
are CLOCK_MONOTONIC ns, 0 for what did not happen; an EVENT's time is in microseconds after the row's `first_ns`. A
block that a full disk or a kill cut off at the end of the file is left out by the reader.
"""

from __future__ import annotations

import enum
import fcntl
import os
import queue
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from server.errors import UserError

MAGIC = b"benchctl-records\x00"
VERSION = 1
ROW = np.dtype(
    [
        ("index", "<u4"),  # position in the workload
        ("worker", "<u2"),
        ("cause", "u1"),  # Cause
        ("retries", "u1"),
        ("http_status", "<u2"),  # 0: no answer
        ("token_source", "u1"),  # TokenSource
        ("reserved", "u1"),
        ("scheduled_ns", "<i8"),
        ("ready_ns", "<i8"),  # scheduled, or when the cap or the turn before let it go, whichever was later
        ("sent_ns", "<i8"),
        ("first_ns", "<i8"),  # first token event
        ("last_ns", "<i8"),  # last token event
        ("end_ns", "<i8"),  # end of the answer, or of the attempt
        ("prompt_tokens", "<i4"),  # -1: unknown
        ("output_tokens", "<i4"),  # -1: unknown
        ("n_events", "<u4"),
    ]
)
EVENT = np.dtype([("offset_us", "<u4"), ("tokens", "<u2")])  # tokens 0: the stream did not say
_ROW = struct.Struct("<IHBBHBBqqqqqqiiI")
_BLOCK = struct.Struct("<4sIII")
_BLOCK_MAGIC = b"BLK1"
_MAX_U32 = 0xFFFFFFFF
FLUSH_BYTES = 256 * 1024
assert _ROW.size == ROW.itemsize

Rows = npt.NDArray[Any]
Events = npt.NDArray[Any]


class Cause(enum.IntEnum):
    """Why a request ended."""

    OK = 0
    CONNECT = 1
    TIMEOUT = 2
    RESET = 3
    HTTP = 4
    ERROR_EVENT = 5
    TRUNCATED = 6
    BAD_STREAM = 7
    BAD_HTTP = 8
    NO_PREVIOUS_TURN = 9
    INTERRUPTED = 10
    ABORTED = 11


CAUSE_LABELS = {
    Cause.CONNECT: "connect error",
    Cause.TIMEOUT: "timeout",
    Cause.RESET: "connection reset",
    Cause.ERROR_EVENT: "error event",
    Cause.TRUNCATED: "truncated stream",
    Cause.BAD_STREAM: "bad stream",
    Cause.BAD_HTTP: "bad http",
    Cause.NO_PREVIOUS_TURN: "turn before failed",
    Cause.ABORTED: "aborted answer",
}


class TokenSource(enum.IntEnum):
    """Where `output_tokens` comes from."""

    NONE = 0
    USAGE = 1
    TOKENIZER = 2
    EVENTS = 3


class Record(msgspec.Struct, gc=False):
    """One request as a worker hands it to the writer."""

    index: int
    worker: int
    cause: int
    retries: int
    http_status: int
    token_source: int
    scheduled_ns: int
    ready_ns: int
    sent_ns: int
    end_ns: int
    prompt_tokens: int
    output_tokens: int
    times_ns: list[int]
    tokens: list[int]
    """Of each event, or empty."""


class RecordFile:
    """The writing side of one process: blocks are appended by a thread, so that a slow disk delays no request."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._rows: list[bytes] = []
        self._events: list[bytes] = []
        self._size = 0
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.error: OSError | None = None
        """What stopped the writing; records after it are lost."""
        self._thread = threading.Thread(target=self._write_blocks, name="records", daemon=True)
        self._thread.start()

    def add(self, record: Record) -> None:
        """Take a finished request."""
        times = record.times_ns
        first, last, count = (times[0], times[-1], len(times)) if times else (0, 0, 0)
        self._rows.append(
            _ROW.pack(
                record.index,
                record.worker,
                record.cause,
                min(record.retries, 255),
                record.http_status,
                record.token_source,
                0,
                record.scheduled_ns,
                record.ready_ns,
                record.sent_ns,
                first,
                last,
                record.end_ns,
                record.prompt_tokens,
                record.output_tokens,
                count,
            )
        )
        if count:
            events = np.zeros(count, EVENT)
            events["offset_us"] = np.minimum((np.array(times, np.int64) - first) // 1000, _MAX_U32)
            if record.tokens:
                events["tokens"] = np.minimum(record.tokens, 0xFFFF)
            self._events.append(events.tobytes())
        self._size += ROW.itemsize + count * EVENT.itemsize
        if self._size >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what was added to the writing thread."""
        if self._rows:
            events = b"".join(self._events)
            head = _BLOCK.pack(_BLOCK_MAGIC, len(self._rows), len(events) // EVENT.itemsize, 0)
            self._queue.put(b"".join((head, *self._rows, events)))
            self._rows, self._events, self._size = [], [], 0

    def close(self) -> None:
        """Write what is left and wait for it; `error` is final then."""
        self.flush()
        self._queue.put(None)
        self._thread.join()
        os.close(self._fd)

    def _write_blocks(self) -> None:
        while (block := self._queue.get()) is not None:
            if self.error is None:
                try:
                    self._append(block)
                except OSError as error:
                    self.error = error

    def _append(self, block: bytes) -> None:
        """All of the block or none of it; other processes append to the same file."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        start = os.fstat(self._fd).st_size
        try:
            view = memoryview(block)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, start)
            raise
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


class Records:
    """The reading side: blocks as memory-mapped arrays, so that a file of any size needs no memory of its own."""

    def __init__(self, path: Path) -> None:
        """Raises UserError: not there, or not a file of records."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(len(MAGIC) + 4)
                if not head.startswith(MAGIC) or len(head) < len(MAGIC) + 4:
                    raise UserError(f"{path}: not a file of benchctl's raw records")
                (length,) = struct.unpack_from("<I", head, len(MAGIC))
                self.header: dict[str, Any] = msgspec.json.decode(file.read(length), type=dict[str, Any])
            self._data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        except msgspec.DecodeError:
            raise UserError(f"{path}: not a file of benchctl's raw records") from None
        if self.header.get("version") != VERSION:
            raise UserError(f"{path}: records of version {self.header.get('version')}; this benchctl reads {VERSION}")
        self._blocks = list(self._walk(len(MAGIC) + 4 + length))
        self.rows: Rows = np.concatenate([rows for rows, _ in self.blocks()]) if self._blocks else np.zeros(0, ROW)
        """All rows in memory, 72 bytes a request."""

    @property
    def start_ns(self) -> int:
        return int(self.header["start_ns"])

    def blocks(self) -> Iterator[tuple[Rows, Events]]:
        """Rows and token events, block by block; a block's events are its rows' in order."""
        for at, n_rows, n_events in self._blocks:
            middle = at + n_rows * ROW.itemsize
            rows = self._data[at:middle].view(ROW)
            yield rows, self._data[middle : middle + n_events * EVENT.itemsize].view(EVENT)

    def _walk(self, at: int) -> Iterator[tuple[int, int, int]]:
        while at + _BLOCK.size <= len(self._data):
            magic, n_rows, n_events, _ = _BLOCK.unpack(self._data[at : at + _BLOCK.size].tobytes())
            end = at + _BLOCK.size + n_rows * ROW.itemsize + n_events * EVENT.itemsize
            if magic != _BLOCK_MAGIC or end > len(self._data):
                return
            yield at + _BLOCK.size, n_rows, n_events
            at = end


def create_records(path: Path, header: dict[str, Any]) -> None:
    """Start a file of records. Raises OSError."""
    text = msgspec.json.encode({**header, "version": VERSION})
    path.write_bytes(MAGIC + struct.pack("<I", len(text)) + text)
