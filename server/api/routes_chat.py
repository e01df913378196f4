"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import decode_json, read_body
from server.api.chunks import EventWriter
from server.api.errors import invalid, prompt_too_long
from server.api.generation import Delta, Prompt
from server.api.logprobs import chat_logprobs
from server.api.protocol import ChatCompletionRequest, ChatMessage
from server.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    Usage,
)
from server.api.serving import Job, check_request, check_room, now_ns, prepare, run_stream, run_whole
from server.api.sse import EventStream
from server.api.state import ApiState, state_of
from server.api.validation import check_text

_DECODER = msgspec.json.Decoder(ChatCompletionRequest)


async def chat_completions(http: Request) -> Response | EventStream:
    state = state_of(http)
    job, format, writer = await _read_request(http, state)
    return await run_whole(job, state, http, format) if writer is None else run_stream(job, state, writer)


async def _read_request(http: Request, state: ApiState) -> tuple[Job, ChatFormat, EventWriter | None]:
    """The request, prepared; the writer of its stream, None when it asks for a whole answer. Raises ApiError."""
    arrival_ns = now_ns()
    with state.lease() as lease:
        body = await read_body(http, state.config.api.max_body_bytes, lease)
        await state.intake.turn()
        await lease.decode(len(body))
        request = decode_json(body, _DECODER, lease)
        del body
        wishes = check_request(request, state)
        _check_unsupported(request)
        check_room(wishes, 1, state)
        token_ids = await render_and_tokenize(
            state,
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            chat_template_kwargs=request.chat_template_kwargs,
            add_special_tokens=bool(request.add_special_tokens),
        )
        prompts = [Prompt(token_ids)]
        job = prepare(request, wishes, prompts, state, "chatcmpl", arrival_ns)
    format = ChatFormat(request, job, state)
    if not request.stream:
        return job, format, None
    options = request.stream_options
    writer = EventWriter(
        format,
        job.generation,
        prompts,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
    return job, format, writer


def _check_unsupported(request: ChatCompletionRequest) -> None:
    """What changes the meaning of an answer is refused, not ignored."""
    if request.response_format is not None and request.response_format.type != "text":
        raise invalid("`response_format` other than `text` is not supported.", "response_format")
    if request.tools and request.tool_choice != "none":
        raise invalid("Tool calls are not supported: send `tool_choice` as `none`, or no `tools`.", "tools")
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise invalid("`tool_choice` needs `tools`.", "tool_choice")


async def render_and_tokenize(
    state: ApiState,
    messages: list[ChatMessage],
    *,
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    chat_template_kwargs: dict[str, Any] | None,
    add_special_tokens: bool,
) -> list[int]:
    """Token ids of a conversation. Raises ApiError 400, 429."""
    limit = state.limits.max_model_len
    # To continue a message, none may be begun: true is only the default.
    generation_prompt = not continue_final_message if add_generation_prompt is None else add_generation_prompt

    text = await state.chat_template.render(
        messages,
        tools=tools,
        add_generation_prompt=generation_prompt,
        continue_final_message=continue_final_message,
        kwargs=chat_template_kwargs,
    )
    if (least := state.tokenizer.min_tokens(text)) >= limit:
        raise prompt_too_long(limit, f"at least {least}", "messages", "messages")
    check_text(text, state.limits, "messages")
    [token_ids] = await state.tokenizer.encode_all([text], add_special_tokens=add_special_tokens)
    if not token_ids:
        raise invalid("The chat template made an empty prompt of the messages.", "messages")
    return token_ids


class ChatFormat:
    """Chunks and responses of this endpoint (see `chunks.ChunkFormat`)."""

    def __init__(self, request: ChatCompletionRequest, job: Job, state: ApiState) -> None:
        self._id = job.generation.id
        self._created = int(time.time())
        self._model = state.model_name
        self._tokenizer = state.tokenizer
        self._prompt_token_ids = job.prompts[0].token_ids
        self._wants_logprobs = bool(request.logprobs)
        self._return_token_ids = bool(request.return_token_ids)
        self._begun = [False] * len(job.generation.sequences)
        self._plain = not (self._wants_logprobs or self._return_token_ids)

    def is_settled(self, index: int) -> bool:
        return self._plain and self._begun[index]

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | msgspec.UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, usage)

    def text_chunk(self, index: int, text: str, usage: Usage | msgspec.UnsetType | None) -> ChatCompletionChunk:
        return self._chunk([ChatChunkChoice(index, ChatDelta(content=text), None, None)], usage)

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def full_chunk(self, delta: Delta, usage: Usage | msgspec.UnsetType | None) -> list[msgspec.Struct]:
        """The delta as a chunk; the first one of a choice comes after a chunk that names the role."""
        chunks: list[msgspec.Struct] = []
        if not self._begun[delta.index]:
            self._begun[delta.index] = True
            role = self._chunk([ChatChunkChoice(delta.index, ChatDelta("assistant", ""), None, None)], usage)
            if self._return_token_ids:
                role.prompt_token_ids = self._prompt_token_ids
            chunks.append(role)
        choice = ChatChunkChoice(
            delta.index, ChatDelta(content=delta.text), self._logprobs(delta), delta.finish_reason, delta.stop_reason
        )
        if self._return_token_ids:
            choice.token_ids = delta.token_ids
        chunks.append(self._chunk([choice], usage))
        return chunks

    def choice(self, delta: Delta) -> ChatChoice:
        return ChatChoice(
            delta.index,
            AssistantMessage("assistant", delta.text),
            self._logprobs(delta),
            delta.finish_reason,
            delta.stop_reason,
            delta.token_ids if self._return_token_ids else msgspec.UNSET,
        )

    def response(self, choices: list[ChatChoice], usage: Usage) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            self._id,
            "chat.completion",
            self._created,
            self._model,
            choices,
            usage,
            self._prompt_token_ids if self._return_token_ids else msgspec.UNSET,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, delta.logprobs) if self._wants_logprobs else None
