"""Runs a prepared generation for an endpoint: whole or as a stream, aborted when its client goes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from server.api.chunks import EventWriter
from server.api.errors import ApiError, invalid
from server.api.generation import Delta, Generation, Prompt, Sequence
from server.api.protocol import ChatCompletionRequest, CompletionRequest
from server.api.sse import EventStream
from server.api.state import ApiState
from server.api.validation import (
    check_stream_options,
    number_of_choices,
    priority,
    resolve_max_tokens,
    sampling_params,
    stop_conditions,
)


def _client_gone() -> ApiError:
    # Nobody reads it; 499 is nginx' status for the log.
    return ApiError(499, "The client closed the connection.", type="client_closed_request")


class Job:
    """One request, ready to run."""

    def __init__(self, generation: Generation, prompts: list[Prompt], priority: int) -> None:
        self.generation = generation
        self.prompts = prompts
        self.priority = priority


def check_request(request: CompletionRequest | ChatCompletionRequest, state: ApiState) -> None:
    """Everything that can be said without the prompt's tokens. Raises ApiError."""
    state.check_serving()
    state.check_model(request.model)
    check_stream_options(request)
    sampling_params(request, state.limits)
    stop_conditions(request)
    priority(request)
    number_of_choices(request)


def prepare(
    request: CompletionRequest | ChatCompletionRequest,
    prompts: list[Prompt],
    state: ApiState,
    id_prefix: str,
    arrival_ns: int,
) -> Job:
    """Sequences for every choice of every prompt. Raises ApiError 400, 429 when the queue is full, 503."""
    # Draining may have begun while the prompt was tokenized.
    state.check_serving()
    params = sampling_params(request, state.limits)
    conditions = stop_conditions(request)
    choices = number_of_choices(request)
    total = len(prompts) * choices
    capacity = state.client.capacity
    if capacity is not None and total > capacity:
        raise invalid(f"The request asks for {total} completions; this server can hold {capacity} at once.", "n")
    budgets = [resolve_max_tokens(request, len(prompt.token_ids), state.limits.max_model_len) for prompt in prompts]
    state.client.admit(total)
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
    return Job(generation, prompts, priority(request))


def _add_seed(seed: int, choice: int) -> int:
    """seed + choice, wrapped around within int64."""
    return (seed + choice + (1 << 63)) % (1 << 64) - (1 << 63)


@asynccontextmanager
async def _running(job: Job, state: ApiState, receive: Receive) -> AsyncIterator[Generation]:
    """The generation is in the engine inside, and is not when left, for whatever reason."""
    generation = job.generation

    async def watch_client() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.fail(_client_gone())

    state.client.submit(generation, job.priority)
    watcher = asyncio.create_task(watch_client())
    try:
        yield generation
    finally:
        watcher.cancel()
        state.client.release(generation)


async def run_whole(job: Job, state: ApiState, request: Request) -> list[Delta]:
    """All that each sequence generated, in order of index. Raises ApiError."""
    async with _running(job, state, request.receive) as generation:
        deltas = await generation.next()
    return sorted(deltas, key=lambda delta: delta.index)


def run_stream(job: Job, state: ApiState, request: Request, writer: EventWriter) -> EventStream:
    """The answer that streams it."""
    return EventStream(_running(job, state, request.receive), job.generation, writer, state.streams)


def now_ns() -> int:
    """Arrival time of a request, CLOCK_MONOTONIC."""
    return time.monotonic_ns()
