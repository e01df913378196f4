"""Streams whose client takes nothing are cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api import sse
from server.api.chunks import EventWriter
from server.api.errors import aborted
from server.api.exchange import Exchange
from server.api.generation import INLINE_POSITIONS, Generation, Prompt, Sequence
from server.api.protocol import ChatCompletionRequest, CompletionRequest
from server.api.routes_chat import ChatFormat
from server.api.routes_completions import CompletionFormat
from server.api.serving import Job
from server.api.sse import EventStream, EventStreams
from server.api.tokenizer import load_tokenizer
from server.api.validation import StopConditions, stop_conditions
from server.ipc.engine_to_api import RequestOutput, TokenLogprobs
from server.sampling_params import SamplingParams

TINY = load_tokenizer("tiny")
THREAD = ThreadPoolExecutor(1)


class Client:
    """An exchange whose client's socket has room until told otherwise."""

    def __init__(self) -> None:
        self.is_writable = True
        self.room = asyncio.Event()
        self.room.set()
        self.written: list[bytes] = []
        self.aborted = asyncio.Event()
        self.is_finished = False
        self.scope = {"state": {"exchange": cast(Exchange, self)}}

    def start(self, headers: bytes) -> None:
        assert b"text/event-stream" in headers

    async def writable(self) -> None:
        await self.room.wait()

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def text_writer(self, before: bytes, after: bytes) -> Callable[[bytes], bool]:
        def write(text: bytes) -> bool:
            if self.is_writable:
                self.written.append(before + text + after)
            return self.is_writable

        return write

    def finish(self, data: bytes) -> None:
        self.written.append(data)
        self.is_finished = True

    def abort(self) -> None:
        self.aborted.set()

    async def receive(self) -> Any:
        raise NotImplementedError

    async def send(self, message: Any) -> None:
        raise NotImplementedError


class Writer:
    """Deltas as bare text."""

    def write(self, deltas: list[Any]) -> bytes:
        return "".join(f"[{delta.text}]" for delta in deltas).encode()

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        return None

    def last(self) -> bytes:
        return b"<usage>"


def generate() -> tuple[Generation, Sequence]:
    generation = Generation("g", 0, whole=False)
    detokenizer = TINY.detokenizer([], skip_special_tokens=True)
    conditions = StopConditions((), False, True, 0)
    return generation, Sequence(generation, "g-0", Prompt([1]), SamplingParams(max_tokens=9), conditions, detokenizer)


def stream_of(generation: Generation, streams: EventStreams, writer: Any = None) -> EventStream:
    return EventStream(
        generation,
        writer or cast(EventWriter, Writer()),
        streams,
        begin=lambda _: None,
        end=lambda _: None,
        thread=THREAD,
    )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tokens_go_straight_out_while_there_is_room_and_in_one_event_after() -> None:
    generation, sequence = generate()
    client, streams = Client(), EventStreams()
    task = asyncio.create_task(stream_of(generation, streams)(client.scope, client.receive, client.send))
    await settle()
    sequence.push(RequestOutput("g-0", [97]))
    assert client.written == [b"[a]"], "no task switch in between"
    client.is_writable = False
    client.room.clear()
    for token in b"bcd":
        sequence.push(RequestOutput("g-0", [token]))
        await settle()
    assert client.written == [b"[a]"]
    client.is_writable = True
    sequence.push(RequestOutput("g-0", [101]))
    assert client.written == [b"[a]"], "what waits in `send` goes first"
    client.room.set()
    await settle()
    assert client.written == [b"[a]", b"[b]", b"[cde]"]
    sequence.push(RequestOutput("g-0", [102], "length"))
    await task
    assert client.written[3:] == [b"[f]", b"<usage>data: [DONE]\n\n"]
    await asyncio.wait_for(streams.ended(), 1)


async def test_failure_ends_the_stream_with_an_error_event() -> None:
    generation, sequence = generate()
    client = Client()
    task = asyncio.create_task(stream_of(generation, EventStreams())(client.scope, client.receive, client.send))
    await settle()
    sequence.push(RequestOutput("g-0", [97]))
    generation.fail(aborted("test"))
    await task
    assert client.written[0] == b"[a]"
    assert client.written[1].startswith(b'data: {"error":{"message":"The request was aborted: test"')


@pytest.mark.parametrize("limit", ["STALL_LIMIT_S", "MAX_UNSENT_TOKENS"])
async def test_stalled_client_is_cut(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(sse, limit, 0.05 if limit == "STALL_LIMIT_S" else 3)
    monkeypatch.setattr(sse, "_CHECK_INTERVAL_S", 0.01)
    generation, sequence = generate()
    client, streams = Client(), EventStreams()
    watch = asyncio.create_task(streams.watch())
    task = asyncio.create_task(stream_of(generation, streams)(client.scope, client.receive, client.send))
    await settle()
    client.is_writable = False
    client.room.clear()
    for token in b"abcdef":
        sequence.push(RequestOutput("g-0", [token]))
        await settle()
    await asyncio.wait_for(client.aborted.wait(), 20)
    client.room.set()
    generation.fail(aborted("client gone"))
    await task
    watch.cancel()


CHOICES = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 511), min_size=1, max_size=3), st.booleans()), max_size=30
)


@settings(deadline=None, max_examples=60)
@given(
    steps=CHOICES,
    chat=st.booleans(),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "stop": st.just("ab"),
            "skip_special_tokens": st.just(False),
            "return_token_ids": st.just(True),
            "stream_options": st.sampled_from([{"include_usage": True}, {"continuous_usage_stats": True}]),
        },
    ),
)
def test_the_short_way_of_a_token_writes_the_same_bytes(
    steps: list[tuple[int, list[int], bool]], chat: bool, fields: dict[str, Any]
) -> None:
    """Any tokens in any step, for two choices, to a client whose socket is full now and then."""
    assert asyncio.run(_bytes_of(steps, chat, fields, short=True)) == asyncio.run(
        _bytes_of(steps, chat, fields, short=False)
    )


async def _bytes_of(steps: list[tuple[int, list[int], bool]], chat: bool, fields: dict[str, Any], short: bool) -> bytes:
    generation = Generation("g", 0, whole=False)
    request: Any
    if chat:
        request = msgspec.convert({**fields, "stream": True, "messages": []}, ChatCompletionRequest)
    else:
        request = msgspec.convert({**fields, "stream": True, "prompt": [1]}, CompletionRequest)
    conditions = stop_conditions(request)
    prompt = Prompt([1])
    sequences = [
        Sequence(
            generation,
            f"g-{choice}",
            prompt,
            SamplingParams(max_tokens=99),
            conditions,
            TINY.detokenizer([], skip_special_tokens=conditions.skip_special_tokens),
        )
        for choice in range(2)
    ]
    state: Any = SimpleNamespace(model_name="m", tokenizer=TINY)
    job = Job(generation, [prompt], 0)
    format = ChatFormat(request, job, state) if chat else CompletionFormat(request, job, state)
    format._created = 1
    options = request.stream_options
    writer = EventWriter(
        format,
        generation,
        [prompt],
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
    client = Client()
    if not short:
        for sequence in sequences:
            sequence.is_plain = False
    task = asyncio.create_task(stream_of(generation, EventStreams(), writer)(client.scope, client.receive, client.send))
    await settle()
    for choice, token_ids, writable in steps:
        client.is_writable = writable
        if writable:
            client.room.set()
            await settle()
        else:
            client.room.clear()
        if sequences[choice].finish_reason is None:
            sequences[choice].push(RequestOutput(f"g-{choice}", token_ids))
        await settle()
    client.is_writable = True
    client.room.set()
    await settle()
    for sequence in sequences:
        if sequence.finish_reason is None:
            sequence.push(RequestOutput(sequence.request_id, [97], "length"))
        await settle()
    await task
    assert client.is_finished
    return b"".join(client.written)


async def test_a_plain_token_takes_the_short_way() -> None:
    """So that the test above compares two ways."""
    generation, sequence = generate()

    class Framing(Writer):
        def frame(self, index: int) -> tuple[bytes, bytes] | None:
            return b"<", b">"

    client = Client()
    task = asyncio.create_task(
        stream_of(generation, EventStreams(), Framing())(client.scope, client.receive, client.send)
    )
    await settle()
    for tokens in ([97], [98], [0xE4], [0xBD, 0xA0], [257], [99, 100], [34]):
        sequence.push(RequestOutput("g-0", tokens))
    wanted = ["[a]", '<"b">', "[]", "[你]", '<"">', "[cd]", '<"\\"">']
    assert client.written == [event.encode() for event in wanted]
    assert sequence.num_tokens == 9
    generation.fail(aborted("test"))
    await task


async def test_many_log_probabilities_are_written_in_a_thread_and_the_stream_goes_on() -> None:
    threads: list[threading.Thread] = []

    class Noting(Writer):
        def write(self, deltas: list[Any]) -> bytes:
            threads.append(threading.current_thread())
            return super().write(deltas)

    generation, sequence = generate()
    client = Client()
    stream = stream_of(generation, EventStreams(), cast(EventWriter, Noting()))
    task = asyncio.create_task(stream(client.scope, client.receive, client.send))
    await settle()
    positions: list[TokenLogprobs | None] = [None, *[TokenLogprobs([65], [-1.0], 1)] * INLINE_POSITIONS]
    sequence.push(RequestOutput("g-0", [97], prompt_logprobs=positions))
    sequence.push(RequestOutput("g-0", [98]))
    while not client.written:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.001)
    sequence.push(RequestOutput("g-0", [99], finish_reason="length"))
    await task
    assert client.written[0].startswith(b"[a")
    assert b"".join(client.written).translate(None, b"[]") == b"abc<usage>data: DONE\n\n"
    assert threads[0] is not threading.current_thread()
    assert set(threads[1:]) == {threading.current_thread()}, "what is little needs no thread"
