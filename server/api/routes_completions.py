"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import MAX_VALUES, decode_json, read_body
from server.api.chunks import EventWriter
from server.api.errors import ApiError, invalid, prompt_too_long
from server.api.generation import Delta, Prompt
from server.api.logprobs import completion_logprobs
from server.api.protocol import CompletionRequest
from server.api.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, Usage
from server.api.serving import Job, check_request, check_room, now_ns, prepare, run_stream, run_whole
from server.api.sse import EventStream
from server.api.state import ApiState, state_of
from server.api.tokenizer import Tokenizer
from server.api.validation import are_integers, check_text, check_token_ids

MAX_PROMPTS = 2048
"""OpenAI's bound on a list of prompts."""
MAX_PROMPT_IDS = 1 << 20
"""Token ids of one request, all prompts together (more only for a longer context): some 100 ms on the event loop."""
_DECODER = msgspec.json.Decoder(CompletionRequest)


async def completions(http: Request) -> Response | EventStream:
    state = state_of(http)
    job, format, writer = await _read_request(http, state)
    return await run_whole(job, state, http, format) if writer is None else run_stream(job, state, writer)


async def _read_request(http: Request, state: ApiState) -> tuple[Job, CompletionFormat, EventWriter | None]:
    """The request, prepared; the writer of its stream, None when it asks for a whole answer. Raises ApiError."""
    arrival_ns = now_ns()
    with state.lease() as lease:
        body = await read_body(http, state.config.api.max_body_bytes, lease)
        await state.intake.turn()
        await lease.decode(len(body))
        # Beside the prompts there is little that a request can hold.
        request = decode_json(body, _DECODER, lease, max(MAX_PROMPT_IDS, state.limits.max_model_len + MAX_VALUES))
        del body
        wishes = check_request(request, state)
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise invalid("`best_of` other than `n` is not supported.", "best_of")
        if request.suffix:
            raise invalid("`suffix` is not supported.", "suffix")
        texts, id_lists = split_prompts(request)
        check_room(wishes, len(texts) + len(id_lists), state)
        prompts = await read_prompts(request, texts, id_lists, state)
        job = prepare(request, wishes, prompts, state, "cmpl", arrival_ns)
    format = CompletionFormat(request, job, state)
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


def _mixed() -> ApiError:
    return invalid(
        "`prompt` must be of one kind: text, a list of texts, token ids, or a list of lists of token ids.", "prompt"
    )


def split_prompts(request: CompletionRequest) -> tuple[list[str], list[list[int]]]:
    """The prompts: texts or lists of token ids, the other list is empty. Raises ApiError 400."""
    raw = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if raw and isinstance(raw[0], int):
        if not are_integers(raw):
            raise _mixed()
        return [], [cast(list[int], raw)]
    kinds = set(map(type, raw))
    if len(kinds) > 1:
        raise _mixed()
    if not raw or not all(raw):
        raise invalid("`prompt` must not be empty.", "prompt")
    if len(raw) > MAX_PROMPTS:
        raise invalid(f"`prompt` can hold at most {MAX_PROMPTS} prompts, got {len(raw)}.", "prompt")
    if kinds == {str}:
        return cast(list[str], raw), []
    return [], cast(list[list[int]], raw)


async def read_prompts(
    request: CompletionRequest, texts: list[str], id_lists: list[list[int]], state: ApiState
) -> list[Prompt]:
    """The prompts as token ids, with their text for `echo`. Raises ApiError 400."""
    if texts:
        return await _tokenize(request, texts, state)
    prompts: list[Prompt] = []
    for token_ids in id_lists:
        check_token_ids(token_ids, "prompt", state.limits.vocab_size)
        text = await state.tokenizer.decode_async(token_ids, skip_special_tokens=False) if request.echo else None
        prompts.append(Prompt(token_ids, text))
    return prompts


async def _tokenize(request: CompletionRequest, texts: list[str], state: ApiState) -> list[Prompt]:
    limit = state.limits.max_model_len
    for text in texts:
        # A text of megabytes that cannot fit is not worth seconds of tokenizing.
        if (least := state.tokenizer.min_tokens(text)) >= limit:
            raise prompt_too_long(limit, f"at least {least}", "prompt", "prompt")
        check_text(text, state.limits, "prompt")
    add_special_tokens = request.add_special_tokens is not False
    id_lists = await state.tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
    if not all(id_lists):
        raise invalid("`prompt` must not be empty: it has no tokens.", "prompt")
    return [Prompt(token_ids, text if request.echo else None) for token_ids, text in zip(id_lists, texts, strict=True)]


class CompletionFormat:
    """Chunks and responses of this endpoint (see `chunks.ChunkFormat`)."""

    def __init__(self, request: CompletionRequest, job: Job, state: ApiState) -> None:
        self._id = job.generation.id
        self._created = int(time.time())
        self._model = state.model_name
        self._tokenizer: Tokenizer = state.tokenizer
        self._sequences = job.generation.sequences
        self._echo = bool(request.echo)
        self._return_token_ids = bool(request.return_token_ids)
        self._begun = [False] * len(self._sequences)
        self._offsets = [0] * len(self._sequences)
        self._plain = not (self._echo or self._return_token_ids)

    def is_settled(self, index: int) -> bool:
        return self._plain

    def response(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> CompletionResponse:
        return CompletionResponse(self._id, "text_completion", self._created, self._model, choices, usage)

    def text_chunk(self, index: int, text: str, usage: Usage | msgspec.UnsetType | None) -> CompletionResponse:
        return self.response([CompletionChoice(index, text, None, None)], usage)

    def full_chunk(self, delta: Delta, usage: Usage | msgspec.UnsetType | None) -> list[msgspec.Struct]:
        return [self.response([self.choice(delta)], usage)]

    def usage_chunk(self, usage: Usage) -> CompletionResponse:
        return self.response([], usage)

    def choice(self, delta: Delta) -> CompletionChoice:
        """A delta of choice `delta.index`; its first one carries the prompt when that is to be echoed."""
        index = delta.index
        prompt = self._sequences[index].prompt
        first = not self._begun[index]
        self._begun[index] = True
        text = delta.text
        if first and self._echo:
            text = (prompt.text or "") + text
        choice = CompletionChoice(
            index, text, self._logprobs(delta, prompt, first), delta.finish_reason, delta.stop_reason
        )
        if self._return_token_ids:
            choice.token_ids = delta.token_ids
            if first:
                choice.prompt_token_ids = prompt.token_ids
        return choice

    def _logprobs(self, delta: Delta, prompt: Prompt, first: bool) -> CompletionLogprobs | None:
        if first and self._echo and delta.prompt_logprobs is None and delta.logprobs:
            self._offsets[delta.index] = len(prompt.text or "")
        positions = [*(delta.prompt_logprobs or ()), *delta.logprobs]
        if not positions:
            return None
        result, self._offsets[delta.index] = completion_logprobs(
            self._tokenizer, positions, prompt.token_ids[0], self._offsets[delta.index]
        )
        return result
