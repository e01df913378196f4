"""Which events of an answer carry tokens, how many, and whether the answer is whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchctl.loadgen.records import Cause
from benchctl.loadgen.stream import AnswerStream


def event(*choices: dict[str, Any], **rest: Any) -> bytes:
    return b"data: " + json.dumps({"id": "x", "choices": list(choices), **rest}).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event({"index": 0, "delta": fields, "finish_reason": None})


def text(content: str, finish: str | None = None, **rest: Any) -> bytes:
    return event({"index": 0, "text": content, "finish_reason": finish}, **rest)


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


DONE = b"data: [DONE]\n\n"


def answer(*portions: bytes, keep_text: bool = False) -> AnswerStream:
    stream = AnswerStream(keep_text=keep_text)
    for number, portion in enumerate(portions):
        stream.feed(portion, 1000 + number)
    stream.close(5000)
    return stream


def test_only_events_with_generated_text_are_token_events() -> None:
    stream = answer(
        delta(role="assistant", content=""),
        delta(role="assistant"),
        delta(content=None),
        delta(reasoning_content="hm"),
        delta(reasoning="hm"),
        delta(content="a"),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        delta(refusal="no"),
        delta(),
        event({"index": 0, "delta": {}, "finish_reason": "stop"}),
        event(usage=usage(7, 5)),
        DONE,
    )
    assert stream.times == [1003, 1004, 1005, 1006, 1007]
    assert (stream.prompt_tokens, stream.completion_tokens) == (7, 5)
    assert stream.done
    assert stream.finished
    assert stream.cause is Cause.OK
    assert stream.tokens == []


def test_events_of_one_read_share_its_time() -> None:
    stream = answer(text("a") + text("b") + text("c"), text("d") + DONE)
    assert stream.times == [1000, 1000, 1000, 1001]


@pytest.mark.parametrize("beside", [True, False])
def test_usage_beside_the_last_choice_or_after_it(beside: bool) -> None:
    last = text("b", "length", usage=usage(3, 2)) if beside else text("b", "length") + event(usage=usage(3, 2))
    stream = answer(text("a", usage=None), last, DONE)
    assert (stream.prompt_tokens, stream.completion_tokens) == (3, 2)
    assert len(stream.times) == 2
    assert stream.tokens == []


def test_continuous_usage_counts_the_tokens_of_each_event() -> None:
    stream = answer(text("a", usage=usage(3, 1)), text("bcd", usage=usage(3, 4)), text("e", usage=usage(3, 5)), DONE)
    assert stream.tokens == [1, 3, 1]
    assert stream.completion_tokens == 5


def test_token_ids_count_even_without_text() -> None:
    stream = answer(
        event({"index": 0, "text": "", "token_ids": [5]}), event({"index": 0, "text": "ab", "token_ids": [6, 7]}), DONE
    )
    assert stream.tokens == [1, 2]
    assert stream.times == [1000, 1001]


def test_text_is_kept_for_the_next_turn_without_the_reasoning() -> None:
    stream = answer(
        delta(reasoning_content="think"), delta(content="Hel"), delta(content="lo\u2028"), DONE, keep_text=True
    )
    assert "".join(stream.texts) == "Hello\u2028"
    assert answer(delta(content="a"), DONE).texts == []


@pytest.mark.parametrize(
    ("portions", "cause", "detail"),
    [
        (
            (text("a"), b'data: {"error":{"message":"out of blocks","code":500}}\n\n', DONE),
            Cause.ERROR_EVENT,
            "out of blocks",
        ),
        ((b"event: error\ndata: it broke\n\n",), Cause.ERROR_EVENT, "it broke"),
        ((b'event: error\ndata: {"message":"it broke"}\n\n',), Cause.ERROR_EVENT, "it broke"),
        ((b'data: {"error":"plain"}\n\n',), Cause.ERROR_EVENT, "plain"),
        ((text("a"), b"data: {broken\n\n"), Cause.BAD_STREAM, "{broken"),
        ((text("a"), b"data: 17\n\n"), Cause.BAD_STREAM, "17"),
        ((text("a"), text("", "abort"), DONE), Cause.ABORTED, "finish_reason abort"),
        ((event({"index": 0, "delta": {}, "finish_reason": "error"}), DONE), Cause.ABORTED, "finish_reason error"),
        ((text("a"),), Cause.TRUNCATED, "without [DONE]"),
        ((b"",), Cause.TRUNCATED, "without [DONE]"),
        ((text("a") + b'data: {"cho',), Cause.BAD_STREAM, '{"cho'),
    ],
)
def test_failures_by_cause(portions: tuple[bytes, ...], cause: Cause, detail: str) -> None:
    stream = answer(*portions)
    assert stream.cause is cause
    assert detail in stream.detail


def test_a_finish_reason_is_an_end_where_done_is_left_out() -> None:
    assert answer(text("a"), text("b", "stop")).cause is Cause.OK
    assert answer(text("a"), text("b", "stop").rstrip()).cause is Cause.OK


def test_done_alone_and_odd_done() -> None:
    assert answer(DONE).times == []
    assert answer(DONE).cause is Cause.OK
    assert answer(b"data:  [DONE] \n\n").done
    # What comes after it is not ours any more.
    assert answer(DONE, text("late")).times == []


def test_fields_of_unusual_types_are_read_loosely() -> None:
    stream = answer(
        delta(content=[{"type": "text", "text": "par"}, {"type": "text", "text": "ts"}]),
        event({"index": 0, "text": 5, "finish_reason": 3}),
        b'data: {"choices":null,"usage":{"prompt_tokens":2,"completion_tokens":2.5}}\n\n',
        b"data:\n\n",
        b": comment\n\n",
        DONE,
        keep_text=True,
    )
    assert stream.cause is Cause.OK
    assert len(stream.times) == 2
    assert stream.texts == ["parts", "5"]
    assert (stream.prompt_tokens, stream.completion_tokens) == (2, None)


def test_an_oversize_event_is_a_bad_stream() -> None:
    stream = AnswerStream()
    for _ in range(9):
        stream.feed(b"data: " * 1 + b"x" * 1_000_000, 1)
    assert stream.cause is Cause.BAD_STREAM
