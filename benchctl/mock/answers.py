"""The bytes of the mock's answers, made once."""

from __future__ import annotations

import msgspec

_WORD = " token"
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Asked(msgspec.Struct):
    """What the mock reads of a request."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")

    @property
    def output_tokens(self) -> int:
        return self.max_tokens or self.max_completion_tokens or 16

    @property
    def prompt_tokens(self) -> int:
        """Token ids are counted, text by its words."""
        prompt = bytes(self.prompt or self.messages)
        return prompt.count(b",") + 1 if prompt.startswith(b"[") and self.prompt else len(prompt.split())


decode_request = msgspec.json.Decoder(Asked).decode


class AnswerBytes:
    """Events of one endpoint."""

    def __init__(self, *, chat: bool, tokens_per_event: int, events_per_write: int) -> None:
        self._chat = chat
        self._key = "delta" if chat else "text"
        self.event = self.token_event(tokens_per_event, None)
        self.full_write = chunk(self.event * events_per_write)

    def token_event(self, tokens: int, usage: tuple[int, int] | None) -> bytes:
        """An event with `tokens` tokens; `usage`: prompt tokens, output tokens so far."""
        text = _WORD * tokens
        content: object = {"content": text} if self._chat else text
        choice: dict[str, object] = {"index": 0, self._key: content, "logprobs": None, "finish_reason": None}
        return self._event([choice], usage)

    def last_events(self, usage: tuple[int, int] | None, finish_reason: str = "length") -> bytes:
        """The finish reason, the usage if asked for, and `[DONE]`."""
        nothing: object = {} if self._chat else ""
        choice: dict[str, object] = {"index": 0, self._key: nothing, "finish_reason": finish_reason}
        events = self._event([choice], None)
        if usage is not None:
            events += self._event([], usage)
        return events + b"data: [DONE]\n\n"

    def whole(self, tokens: int, prompt_tokens: int) -> bytes:
        """The JSON of an answer that is not streamed."""
        text = _WORD * tokens
        choice: dict[str, object] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        kind = "chat.completion" if self._chat else "text_completion"
        return msgspec.json.encode(self._document(kind, [choice], (prompt_tokens, tokens)))

    def _event(self, choices: list[dict[str, object]], usage: tuple[int, int] | None) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return b"data: " + msgspec.json.encode(self._document(kind, choices, usage)) + b"\n\n"

    def _document(
        self, kind: str, choices: list[dict[str, object]], usage: tuple[int, int] | None
    ) -> dict[str, object]:
        document: dict[str, object] = {
            "id": "cmpl-00000000-0000-0000-0000-000000000000",
            "object": kind,
            "created": 1_700_000_000,
            "model": "mock",
            "choices": choices,
        }
        if usage is not None:
            prompt, output = usage
            document["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
            }
        return document


def chunk(data: bytes) -> bytes:
    """One chunk of HTTP's chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(status: bytes, body: bytes) -> bytes:
    """A JSON answer of known length."""
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
