"""What a load generator needs to know of a streamed chunk, decoded without building the rest."""

from __future__ import annotations

from typing import Any

import msgspec


class Delta(msgspec.Struct, gc=False):
    """`delta` of a chat chunk. Reasoning has two spellings (DeepSeek's and vLLM's, OpenRouter's)."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct, gc=False):
    """A chunk of /v1/completions or /v1/chat/completions."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


def decode_loosely(data: bytes) -> Chunk:
    """A chunk some of whose fields have types of their own (content as a list of parts, an object as text).

    Raises `msgspec.DecodeError` when it is not a JSON object.
    """
    document = msgspec.json.decode(data, type=dict[str, Any])
    chunk = Chunk()
    if document.get("error") is not None:
        chunk.error = msgspec.Raw(msgspec.json.encode(document["error"]))
    usage = document.get("usage")
    if isinstance(usage, dict):
        chunk.usage = Usage(_integer(usage.get("prompt_tokens")), _integer(usage.get("completion_tokens")))
    choices = document.get("choices")
    chunk.choices = [_choice(choice) for choice in choices if isinstance(choice, dict)] if choices else []
    return chunk


def error_message(raw: msgspec.Raw | bytes) -> str:
    """The text of an OpenAI error object, of the body around it, or of whatever came instead; one line."""
    try:
        document = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        document = bytes(raw).decode("utf-8", "replace")
    if isinstance(document, dict):
        inner = document.get("error", document)
        document = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(document).split())[:300]


def _choice(choice: dict[str, Any]) -> Choice:
    delta = choice.get("delta")
    finish = choice.get("finish_reason")
    return Choice(
        text=_text(choice.get("text")),
        delta=_delta(delta) if isinstance(delta, dict) else None,
        finish_reason=None if finish is None else str(finish),
    )


def _delta(delta: dict[str, Any]) -> Delta:
    calls = delta.get("tool_calls")
    return Delta(
        content=_text(delta.get("content")),
        reasoning_content=_text(delta.get("reasoning_content")),
        reasoning=_text(delta.get("reasoning")),
        refusal=_text(delta.get("refusal")),
        tool_calls=[msgspec.Raw(b"{}")] if calls else None,
    )


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(str(part.get("text", "")) for part in value if isinstance(part, dict))
    return str(value)


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None
