"""Runs a request for an endpoint: checked, admitted, prepared, and answered whole or as a stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import json_response, raw_json_response
from server.api.chunks import EventWriter, encode, usage_of
from server.api.errors import ApiError, invalid
from server.api.exchange import Exchange
from server.api.generation import INLINE_POSITIONS, Delta, Generation, Prompt, Sequence
from server.api.protocol import ChatCompletionRequest, CompletionRequest
from server.api.responses import Usage
from server.api.sse import EventStream
from server.api.state import ApiState
from server.api.validation import (
    StopConditions,
    check_stream_options,
    number_of_choices,
    priority,
    resolve_max_tokens,
    sampling_params,
    stop_conditions,
)
from server.sampling_params import SamplingParams


def _client_gone() -> ApiError:
    # Nobody reads it; 499 is nginx' status for the log.
    return ApiError(499, "The client closed the connection.", type="client_closed_request")


@dataclass(slots=True)
class Wishes:
    """What a request asks for, whatever its prompt is."""

    params: SamplingParams
    """`max_tokens` is 1: it depends on each prompt."""
    conditions: StopConditions
    choices: int
    priority: int


@dataclass(slots=True)
class Job:
    """One request, ready to run."""

    generation: Generation
    prompts: list[Prompt]
    priority: int


def check_request(request: CompletionRequest | ChatCompletionRequest, state: ApiState) -> Wishes:
    """Everything that can be said without the prompt's tokens. Raises ApiError."""
    state.check_serving()
    state.check_model(request.model)
    check_stream_options(request)
    return Wishes(
        sampling_params(request, state.limits), stop_conditions(request), number_of_choices(request), priority(request)
    )


def check_room(wishes: Wishes, num_prompts: int, state: ApiState) -> None:
    """Refuse what could not be queued, before its prompts cost anything. Raises ApiError 400, 429."""
    total = num_prompts * wishes.choices
    capacity = state.client.capacity
    if capacity is not None and total > capacity:
        raise invalid(f"The request asks for {total} completions; this server can hold {capacity} at once.", "n")
    state.client.admit(total)


def prepare(
    request: CompletionRequest | ChatCompletionRequest,
    wishes: Wishes,
    prompts: list[Prompt],
    state: ApiState,
    id_prefix: str,
    arrival_ns: int,
) -> Job:
    """Sequences for every choice of every prompt. Raises ApiError 400, 429 when the queue is full, 503."""
    params, conditions, choices = wishes.params, wishes.conditions, wishes.choices
    budgets = [resolve_max_tokens(request, len(prompt.token_ids), state.limits.max_model_len) for prompt in prompts]
    # Draining may have begun, or the queue filled up, while the prompt was tokenized.
    state.check_serving()
    state.client.admit(len(prompts) * choices)
    generation = Generation(f"{id_prefix}-{secrets.token_hex(16)}", arrival_ns, whole=not request.stream)
    for prompt, max_tokens in zip(prompts, budgets, strict=True):
        for choice in range(choices):
            Sequence(
                generation,
                f"{generation.id}-{len(generation.sequences)}",
                prompt,
                msgspec.structs.replace(
                    params,
                    max_tokens=max(max_tokens, 1),
                    # Choices of one seeded request differ from each other, and not from run to run.
                    seed=None if params.seed is None else _add_seed(params.seed, choice),
                ),
                conditions,
                state.tokenizer.detokenizer(prompt.token_ids, skip_special_tokens=conditions.skip_special_tokens),
                prompt_only=max_tokens == 0,
            )
    return Job(generation, prompts, wishes.priority)


def _add_seed(seed: int, choice: int) -> int:
    """seed + choice, wrapped around within int64."""
    return (seed + choice + (1 << 63)) % (1 << 64) - (1 << 63)


def _begin(job: Job, state: ApiState, exchange: Exchange) -> None:
    """Put the generation into the engine; it fails when its client goes. Pair with `_end`."""
    generation = job.generation
    state.client.submit(generation, job.priority)
    exchange.watch(lambda: generation.fail(_client_gone()))


def _end(job: Job, state: ApiState, exchange: Exchange) -> None:
    exchange.unwatch()
    state.client.release(job.generation)


class WholeFormat(Protocol):
    """How an endpoint writes an answer that is no stream."""

    def choice(self, delta: Delta) -> msgspec.Struct:
        """All of one sequence."""

    def response(self, choices: list[Any], usage: Usage) -> msgspec.Struct:
        """The answer; `choices` in order of index, encoded ones among them."""


async def run_whole(job: Job, state: ApiState, request: Request, format: WholeFormat) -> Response:
    """The answer with all that each sequence generated. Raises ApiError."""
    exchange: Exchange = request.scope["state"]["exchange"]
    try:
        _begin(job, state, exchange)
        deltas = await job.generation.next()
    finally:
        _end(job, state, exchange)
    deltas.sort(key=lambda delta: delta.index)
    usage = usage_of(job.generation, job.prompts)
    if sum(delta.num_positions for delta in deltas) <= INLINE_POSITIONS:
        return json_response(format.response([format.choice(delta) for delta in deltas], usage))

    def write() -> bytes:
        # A call that encodes lets no other thread run until it is done: one for each choice.
        choices = [msgspec.Raw(encode(format.choice(delta))) for delta in deltas]
        return encode(format.response(choices, usage))

    return raw_json_response(await asyncio.get_running_loop().run_in_executor(state.writer_thread, write))


def run_stream(job: Job, state: ApiState, writer: EventWriter) -> EventStream:
    """The answer that streams it."""
    return EventStream(
        job.generation,
        writer,
        state.streams,
        begin=lambda exchange: _begin(job, state, exchange),
        end=lambda exchange: _end(job, state, exchange),
        thread=state.writer_thread,
    )


def now_ns() -> int:
    """Arrival time of a request, CLOCK_MONOTONIC."""
    return time.monotonic_ns()
