"""Formats generated text as the JSON of streamed chunks and of whole responses."""

from __future__ import annotations

from typing import Protocol

import msgspec

from server.api.generation import Delta, Generation, Prompt
from server.api.responses import PromptTokensDetails, Usage

encode = msgspec.json.encode
_SUFFIX_END = b"\n\n"


def usage_of(generation: Generation, prompts: list[Prompt]) -> Usage:
    """Tokens so far; a prompt counts once however many choices it has."""
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    completion_tokens = generation.num_completion_tokens
    cached = sum(prompt.num_cached_tokens or 0 for prompt in prompts)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached))


class ChunkFormat(Protocol):
    """How an endpoint writes its chunks."""

    def text_chunk(self, index: int, text: str, usage: Usage | msgspec.UnsetType | None) -> msgspec.Struct:
        """A chunk with nothing but text."""

    def full_chunk(self, delta: Delta, usage: Usage | msgspec.UnsetType | None) -> list[msgspec.Struct]:
        """The chunks of a delta that has more to it."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The last chunk of `stream_options.include_usage`."""

    def is_settled(self, index: int) -> bool:
        """Whether chunks of choice `index` are from now on nothing but text, up to its last one."""


class EventWriter:
    """Deltas to SSE bytes. A plain delta costs one JSON string between two constants of its sequence."""

    def __init__(
        self,
        format: ChunkFormat,
        generation: Generation,
        prompts: list[Prompt],
        *,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._format = format
        self._generation = generation
        self._prompts = prompts
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and behind the text (a JSON string) in every further event of choice `index` but the last
        one; None while that is not settled, or when they carry more than text."""
        if self._continuous_usage or not self._format.is_settled(index):
            return None
        return self._frame(index)

    def _usage(self) -> Usage | msgspec.UnsetType | None:
        if self._continuous_usage:
            return usage_of(self._generation, self._prompts)
        return None if self._include_usage else msgspec.UNSET

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the text in the plain chunks of choice `index`."""
        frame = self._frames.get(index)
        if frame is None:
            mark = f"text of {self._generation.id}"
            usage = None if self._include_usage and not self._continuous_usage else msgspec.UNSET
            chunk = encode(self._format.text_chunk(index, mark, usage))
            before, after = chunk.split(encode(mark))
            frame = self._frames[index] = (b"data: " + before, after + _SUFFIX_END)
        return frame

    def write(self, deltas: list[Delta]) -> bytes:
        """The events of `deltas`."""
        if len(deltas) == 1:
            return self._event(deltas[0])
        return b"".join([self._event(delta) for delta in deltas])

    def _event(self, delta: Delta) -> bytes:
        if delta.finish_reason is not None or delta.logprobs or not self._format.is_settled(delta.index):
            chunks = self._format.full_chunk(delta, self._usage())
            return b"".join([b"data: " + encode(chunk) + b"\n\n" for chunk in chunks])
        before, after = self._frame(delta.index)
        if self._continuous_usage:
            usage = encode(usage_of(self._generation, self._prompts))
            # `}` and the blank line end the constant part.
            return b"".join((before, encode(delta.text), after[:-3], b',"usage":', usage, b"}\n\n"))
        return b"".join((before, encode(delta.text), after))

    def last(self) -> bytes:
        """What follows the last delta: the usage, if asked for."""
        if not self._include_usage:
            return b""
        usage = usage_of(self._generation, self._prompts)
        return b"data: " + encode(self._format.usage_chunk(usage)) + b"\n\n"
