"""The SSE parser: every spelling of an event, split at every byte, against a plain reading of the standard."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.loadgen.sse import Event, SseError, SseParser


def parse(stream: bytes, cuts: list[int] | None = None, *, close: bool = True) -> list[bytes]:
    """All events of a stream that arrives cut at these positions."""
    parser = SseParser()
    edges = [0, *sorted(cuts or []), len(stream)]
    events = [event for begin, end in itertools.pairwise(edges) for event in parser.feed(stream[begin:end])]
    return events + (parser.close() if close else [])


def reference(stream: bytes) -> list[bytes]:
    """The standard's algorithm over the whole stream at once; the end of the stream completes an event."""
    events, data = [], []
    for line in [*re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf")), b""]:
        if not line:
            if data:
                events.append(b"\n".join(data))
            data = []
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
    return events


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b'data: {"a":1}\n\n', [b'{"a":1}']),
        (b"data: 1\n\ndata: 2\n\ndata: 3\n\n", [b"1", b"2", b"3"]),
        (b"data: 1\r\n\r\ndata: 2\r\n\r\n", [b"1", b"2"]),
        (b"data: 1\r\rdata: 2\r\r", [b"1", b"2"]),
        (b"data:1\n\ndata:  2\n\n", [b"1", b" 2"]),
        (b": keep-alive\n\ndata: 1\n\n:\n\n", [b"1"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"id: 7\nretry: 10\ndata: 1\nunknown: x\n\n", [b"1"]),
        (b"data\n\n", [b""]),
        (b"\xef\xbb\xbfdata: 1\n\n", [b"1"]),
        (b"data: 1\n\ndata: last", [b"1", b"last"]),
        (b"data: 1\n\ndata: last\n", [b"1", b"last"]),
        (b"event: nothing\n\n", []),
        (b"\n\n\n", []),
        (b"", []),
        (
            'data: {"text":"a\u2028b\u2029c\u0085d\x0b\x0c"}\n\n'.encode(),
            ['{"text":"a\u2028b\u2029c\u0085d\x0b\x0c"}'.encode()],
        ),
        (b"data: 1\n\ndata: 2\ndata: 3\n\n", [b"1", b"2\n3"]),
        (b"data: 1\n\n: x\n\ndata: 2\n\n", [b"1", b"2"]),
        (b"data: data: 1\n\n", [b"data: 1"]),
    ],
)
def test_every_spelling_of_an_event_at_every_split(stream: bytes, events: list[bytes]) -> None:
    assert parse(stream) == events
    for cut in range(len(stream)):
        assert parse(stream, [cut]) == events, cut
    assert parse(stream, list(range(len(stream)))) == events


LINES = st.sampled_from(
    [
        b"data: {}",
        b"data:1",
        b"data",
        b"data: a:b",
        b": c",
        b"",
        b"",
        b"event: error",
        b"id: 1",
        b"xdata: 2",
        b"data:  ",
        b"\xe2\x80\xa8",
    ]
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=14).map(
    lambda lines: b"".join(line + end for line, end in lines)
) | st.lists(st.sampled_from([b'data: {"a": 1}\n\n', b"data: [DONE]\n\n"]), max_size=6).map(b"".join)


@settings(deadline=None)
@given(STREAMS, st.binary(max_size=3), st.data())
def test_any_split_of_any_stream_gives_the_same_events(stream: bytes, tail: bytes, data: st.DataObject) -> None:
    stream += tail
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert [bytes(event) for event in parse(stream, cuts)] == reference(stream)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12).filter(lambda b: b"\n" not in b and b"\r" not in b), min_size=1, max_size=6))
def test_the_usual_form_carries_any_bytes(payloads: list[bytes]) -> None:
    stream = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    assert parse(stream, close=False) == payloads


def test_an_event_is_complete_with_its_blank_line_and_not_before() -> None:
    parser = SseParser()
    assert parser.feed(b"data: 1\n") == []
    assert parser.feed(b"\n") == [b"1"]
    assert parser.feed(b"data: 2\r\n\r") == [b"2"]
    assert parser.feed(b"\ndata: 3\r\n\r\n") == [b"3"]


def test_typed_events_keep_their_type() -> None:
    for cut in range(30):
        (event,) = parse(b'event: error\ndata: {"e":1}\n\n', [min(cut, 28)])
        assert isinstance(event, Event)
        assert (event, event.type) == (b'{"e":1}', b"error")
    (plain,) = parse(b"event: message\ndata: 1\n\n")
    assert type(plain) is bytes
    # The type ends with its event, even one without data.
    assert [type(event) for event in parse(b"event: error\n\ndata: 1\n\n")] == [bytes]


@pytest.mark.parametrize("portion", [b"data: " + b"x" * 400, b"x" * 400, b"data: x\n" * 50])
def test_memory_is_bounded(portion: bytes) -> None:
    parser = SseParser(max_event_bytes=1000)

    def feed_on() -> None:
        for _ in range(20):
            parser.feed(portion)

    with pytest.raises(SseError, match="larger than 1000 bytes"):
        feed_on()


def test_large_events_in_small_portions() -> None:
    payload = b"y" * 300_000
    stream = b"data: 1\n\ndata: " + payload + b"\n\ndata: 2\n\n"
    assert parse(stream, list(range(0, len(stream), 1000)), close=False) == [b"1", payload, b"2"]
