"""Requests of the OpenAI schema, with vLLM's additional sampling fields. Unknown fields are ignored, as there."""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """Send one last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that completions and chat completions share. null is the default everywhere."""

    model: str | None = None
    """None: the one model that is served."""
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Token id, as a string, -> what is added to its logit, -100 to 100."""
    max_tokens: int | None = None
    user: str | None = None

    top_k: int | None = None
    """-1 and 0: all tokens."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own (such as BOS): by default yes for a prompt, no after a chat template."""


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """Text, texts, token ids, or lists of token ids; a list holds one kind only."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str


class ChatCompletionRequest(SamplingFields, kw_only=True):
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    """Goes before `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt`, or `messages` to be put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
