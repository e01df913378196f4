"""Streams whose client takes nothing are cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from server.api import sse
from server.api.chunks import EventWriter
from server.api.errors import aborted
from server.api.generation import Generation, Prompt, Sequence
from server.api.http_protocol import BodyWriter
from server.api.sse import EventStream, EventStreams
from server.api.tokenizer import load_tokenizer
from server.api.validation import StopConditions
from server.ipc.engine_to_api import RequestOutput
from server.sampling_params import SamplingParams

TINY = load_tokenizer("tiny")


class Body:
    """A client's socket that has room until told otherwise."""

    def __init__(self) -> None:
        self.is_writable = True
        self.written: list[bytes] = []
        self.aborted = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.aborted.set()


class Client:
    """An ASGI channel; `send` waits while the socket is full."""

    def __init__(self) -> None:
        self.body = Body()
        self.room = asyncio.Event()
        self.room.set()
        self.sent: list[dict[str, Any]] = []
        self.scope = {"state": {"raw_send": self.send, "body_writer": cast(BodyWriter, self.body)}}

    async def send(self, message: Any) -> None:
        await self.room.wait()
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.body.written.append(message["body"])

    async def receive(self) -> Any:
        raise NotImplementedError


class Writer:
    """Deltas as bare text."""

    def write(self, deltas: list[Any]) -> bytes:
        return "".join(f"[{delta.text}]" for delta in deltas).encode()

    def last(self) -> bytes:
        return b"<usage>"


def generate() -> tuple[Generation, Sequence]:
    generation = Generation("g", 0, whole=False)
    detokenizer = TINY.detokenizer([], skip_special_tokens=True)
    conditions = StopConditions((), False, True, 0)
    return generation, Sequence(generation, "g-0", Prompt([1]), SamplingParams(max_tokens=9), conditions, detokenizer)


@contextlib.asynccontextmanager
async def _entered(generation: Generation) -> AsyncIterator[Generation]:
    yield generation


def stream_of(generation: Generation, streams: EventStreams) -> EventStream:
    return EventStream(_entered(generation), generation, cast(EventWriter, Writer()), streams)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tokens_go_straight_out_while_there_is_room_and_in_one_event_after() -> None:
    generation, sequence = generate()
    client, streams = Client(), EventStreams()
    task = asyncio.create_task(stream_of(generation, streams)(client.scope, client.receive, client.send))
    await settle()
    sequence.push(RequestOutput("g-0", [97]))
    assert client.body.written == [b"[a]"], "no task switch in between"
    client.body.is_writable = False
    client.room.clear()
    for token in b"bcd":
        sequence.push(RequestOutput("g-0", [token]))
        await settle()
    assert client.body.written == [b"[a]"]
    client.body.is_writable = True
    sequence.push(RequestOutput("g-0", [101]))
    assert client.body.written == [b"[a]"], "what waits in `send` goes first"
    client.room.set()
    await settle()
    assert client.body.written == [b"[a]", b"[b]", b"[cde]"]
    sequence.push(RequestOutput("g-0", [102], "length"))
    await task
    assert client.body.written[3:] == [b"[f]", b"<usage>data: [DONE]\n\n"]
    await asyncio.wait_for(streams.ended(), 1)


async def test_failure_ends_the_stream_with_an_error_event() -> None:
    generation, sequence = generate()
    client = Client()
    task = asyncio.create_task(stream_of(generation, EventStreams())(client.scope, client.receive, client.send))
    await settle()
    sequence.push(RequestOutput("g-0", [97]))
    generation.fail(aborted("test"))
    await task
    assert client.body.written[0] == b"[a]"
    assert client.body.written[1].startswith(b'data: {"error":{"message":"The request was aborted: test"')


@pytest.mark.parametrize("limit", ["STALL_LIMIT_S", "MAX_UNSENT_TOKENS"])
async def test_stalled_client_is_cut(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(sse, limit, 0.05 if limit == "STALL_LIMIT_S" else 3)
    monkeypatch.setattr(sse, "_CHECK_INTERVAL_S", 0.01)
    generation, sequence = generate()
    client, streams = Client(), EventStreams()
    watch = asyncio.create_task(streams.watch())
    task = asyncio.create_task(stream_of(generation, streams)(client.scope, client.receive, client.send))
    await settle()
    client.body.is_writable = False
    client.room.clear()
    for token in b"abcdef":
        sequence.push(RequestOutput("g-0", [token]))
        await settle()
    await asyncio.wait_for(client.body.aborted.wait(), 20)
    client.room.set()
    generation.fail(aborted("client gone"))
    await task
    watch.cancel()
