"""The state of one streamed answer: which events carried tokens, and when each was complete."""

from __future__ import annotations

import msgspec

from benchctl.loadgen.chunks import Choice, Chunk, decode_chunk, decode_loosely, error_message
from benchctl.loadgen.records import Cause
from benchctl.loadgen.sse import Event, SseError, SseParser

MOST_TOKENS = 2**31 - 1
"""What a record can hold."""
_GIVEN_UP = frozenset({"abort", "error"})
"""Finish reasons with which vLLM and SGLang end, after a 200, an answer that the engine gave up."""


class AnswerStream:
    """Consumes the body of a 200 answer; all times are CLOCK_MONOTONIC ns given by the caller."""

    __slots__ = (
        "_keep_text",
        "_parser",
        "_reported",
        "cause",
        "completion_tokens",
        "detail",
        "done",
        "finished",
        "prompt_tokens",
        "texts",
        "times",
        "tokens",
    )

    def __init__(self, *, keep_text: bool = False) -> None:
        self._parser = SseParser()
        self._keep_text = keep_text
        self._reported = 0
        self.times: list[int] = []
        """Of each token event."""
        self.tokens: list[int] = []
        """Tokens of each token event (0: this one did not say), or empty when the stream does not say."""
        self.texts: list[str] = []
        """Generated text, if it is kept; without reasoning, which a chat history leaves out."""
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.done = False
        """`[DONE]` was seen."""
        self.finished = False
        """A choice gave its finish_reason."""
        self.cause = Cause.OK
        self.detail = ""

    def feed(self, data: bytes, now_ns: int) -> None:
        """Take more of the body, received at `now_ns`. A failure is left in `cause` and `detail`."""
        if self.cause or self.done:
            return
        try:
            events = self._parser.feed(data)
        except SseError as error:
            self._fail(Cause.BAD_STREAM, str(error))
            return
        if events:
            self._consume(events, now_ns)

    def close(self, now_ns: int) -> None:
        """The body has ended; decides whether the answer is whole."""
        if not self.cause and not self.done:
            try:
                self._consume(self._parser.close(), now_ns)
            except SseError as error:
                self._fail(Cause.BAD_STREAM, str(error))
        if not self.cause and not self.done and not self.finished:
            self._fail(Cause.TRUNCATED, "the stream ended without [DONE] or a finish_reason")

    def _consume(self, events: list[bytes], now_ns: int) -> None:
        for data in events:
            try:
                chunk = decode_chunk(data)
            except msgspec.DecodeError:
                if data.strip() == b"[DONE]":
                    self.done = True
                    return
                slow = self._decode_slowly(data)
                if slow is None:
                    continue
                chunk = slow
            if chunk.error is not None or type(data) is Event:
                self._error_event(data, chunk)
            if self.cause:
                return
            usage = chunk.usage
            if chunk.choices:
                for choice in chunk.choices:
                    if choice.finish_reason is not None:
                        self.finished = True
                        if choice.finish_reason in _GIVEN_UP:
                            self._fail(Cause.ABORTED, f"finish_reason {choice.finish_reason}")
                            return
                    if choice.text or choice.delta is not None or choice.token_ids:
                        self._take(choice, chunk, now_ns)
            if usage is not None:
                if _can_be(usage.completion_tokens):
                    self.completion_tokens = usage.completion_tokens
                if _can_be(usage.prompt_tokens):
                    self.prompt_tokens = usage.prompt_tokens

    def _take(self, choice: Choice, chunk: Chunk, now_ns: int) -> None:
        delta = choice.delta
        text = choice.text if delta is None else delta.content
        if not (
            text
            or choice.token_ids
            or (delta is not None and (delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls))
        ):
            return
        if self._keep_text and text:
            self.texts.append(text)
        times = self.times
        times.append(now_ns)
        usage = chunk.usage
        if choice.token_ids is not None:
            tokens = len(choice.token_ids)
        elif usage is not None and usage.completion_tokens is not None and _can_be(usage.completion_tokens):
            tokens = usage.completion_tokens - self._reported
            self._reported = usage.completion_tokens
        else:
            tokens = 0
        # A usage that comes with the last event only is the total, so the first event decides whether events say.
        if self.tokens or (tokens > 0 and len(times) == 1):
            self.tokens.append(max(tokens, 0))

    def _decode_slowly(self, data: bytes) -> Chunk | None:
        """An event that is not the usual chunk; None when there is nothing in it."""
        if not data.strip():
            return None
        try:
            return decode_loosely(data)
        except msgspec.DecodeError as error:
            if type(data) is Event and data.type == b"error":
                return Chunk()
            shown = bytes(data[:80]).decode("utf-8", "replace")
            self._fail(Cause.BAD_STREAM, f"an event is not a JSON object ({error}): {shown}")
            return None

    def _error_event(self, data: bytes, chunk: Chunk) -> None:
        if chunk.error is not None or (type(data) is Event and data.type == b"error"):
            self._fail(Cause.ERROR_EVENT, error_message(data))

    def _fail(self, cause: Cause, detail: str) -> None:
        if not self.cause:
            self.cause = cause
            self.detail = detail


def _can_be(count: int | None) -> bool:
    """Whether a server's count can be one of tokens; what the records have no room for is as good as not said."""
    return count is not None and 0 <= count <= MOST_TOKENS
