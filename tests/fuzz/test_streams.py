"""Bytes that arrive in any portions and of any kind: the SSE parser and the sockets between processes."""

from __future__ import annotations

import itertools
import socket
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from benchctl.loadgen.sse import Event, SseError, SseParser
from server.ipc import api_to_engine, engine_to_api, engine_to_worker, worker_to_engine
from server.ipc.api_to_engine import AbortRequests, ApiReady
from tests.fuzz.budget import fuzz

PIECES = st.sampled_from(
    [
        *(b"data: ", b"data:", b"data", b"event: error", b"event:", b"id: 7", b": comment", b"retry: 1"),
        *(b"\n", b"\n\n", b"\r", b"\r\n", b"\r\n\r\n", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xff", b"\0"),
        *(b"{}", b"[DONE]", b'{"a": "b"}', b" ", b"x"),
    ]
)


def reference(stream: bytes) -> list[tuple[bytes, bytes]]:
    """(type, data) of every event of a whole stream, by the letter of the WHATWG algorithm."""
    events: list[tuple[bytes, bytes]] = []
    data: list[bytes] = []
    kind = b""
    for line in [*stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"), b""]:
        if not line:
            if data:
                events.append((kind or b"message", b"\n".join(data)))
            data, kind = [], b""
            continue
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            kind = value
    return events


@given(pieces=st.lists(PIECES | st.binary(max_size=8), max_size=30), cuts=st.lists(st.integers(0, 200), max_size=12))
@fuzz(600)
def test_sse_in_any_portions(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    parser = SseParser()
    events = [e for begin, end in itertools.pairwise(places) for e in parser.feed(stream[begin:end])]
    events += parser.close()
    found = [(e.type if isinstance(e, Event) else b"message", bytes(e)) for e in events]
    assert found == reference(stream)


@pytest.mark.parametrize("endless", [b"x", b"data: x\n", b"data:\n", b"data", b"\r", b": comment\n", b"event: x\n"])
def test_sse_without_an_end_takes_bounded_memory(endless: bytes) -> None:
    parser = SseParser(max_event_bytes=1 << 16)
    portion = endless * (4096 // len(endless))
    tracemalloc.start()
    try:
        for _ in range(64):  # 256 KiB
            parser.feed(portion)
    except SseError:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


DIRECTIONS: dict[str, Any] = {
    "to engine": api_to_engine.ToEngine,
    "from engine": engine_to_api.FromEngine,
    "to worker": engine_to_worker.ScheduleStep,
    "from worker": worker_to_engine.FromWorker,
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=15,
)
TAGS = st.sampled_from(["add", "abort", "control", "ready", "outputs", "step", "shutdown", "result"])


@given(
    direction=st.sampled_from(sorted(DIRECTIONS)),
    frame=st.binary(max_size=100)
    | st.builds(lambda tag, rest: msgspec.msgpack.encode([tag, *rest]), TAGS, st.lists(VALUES, max_size=9)),
)
@fuzz(200)
def test_frames_are_messages_or_refused(direction: str, frame: bytes) -> None:
    kind = DIRECTIONS[direction]
    try:
        message = msgspec.msgpack.decode(frame, type=kind)
    except msgspec.DecodeError:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) is not None


@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
def test_frames_that_promise_gigabytes_allocate_nothing(head: bytes) -> None:
    frame = b"\x92\xa5abort" + head + b"\x01"
    tracemalloc.start()
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(frame, type=api_to_engine.ToEngine)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_frames_nested_without_end_are_refused() -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        msgspec.msgpack.decode(b"\x91" * 100_000, type=api_to_engine.ToEngine)


def test_garbage_on_the_socket_itself_disturbs_nobody(tmp_path: Path) -> None:
    """Bytes below ZMQ's own framing: the connection is dropped, messages of others arrive."""
    context: zmq.Context[Any] = zmq.Context()
    receiver = api_to_engine.receiver(context, str(tmp_path))
    sender = api_to_engine.sender(context, str(tmp_path))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(200), greeting, greeting + b"\xff" * 500, b"\xff" * 64):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(tmp_path / "engine-in.sock"))
            raw.sendall(garbage)
            time.sleep(0.02)
    sender.send(ApiReady(0))
    assert receiver.receive(5000) == ApiReady(0)
    for part in (b"", b"\xc1", b"\x92\xa5abort"):
        sender.socket.send(part)
        with pytest.raises(msgspec.DecodeError):
            receiver.receive(5000)
    sender.send(AbortRequests(["x"]))
    assert receiver.receive(5000) == AbortRequests(["x"])
    sender.close()
    receiver.close()
    context.term()
