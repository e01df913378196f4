"""Engine core -> API process: generated tokens, finish reasons and statistics, one message per step and client."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import zmq

from server.ipc.sockets import Receiver, Sender, endpoint

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position; the sampled (or prompt) token first, then the likeliest in order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """1-based rank of the first token in the vocabulary."""


class RequestOutput(msgspec.Struct, array_like=True):
    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the request (it is the last of `new_token_ids`); None when EOS or another reason."""
    logprobs: list[TokenLogprobs] | None = None
    """One per new token, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Once, with the first token: one per prompt token, None for the first."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache (set with the first output)."""
    queued_ns: int = 0
    scheduled_ns: int = 0
    """CLOCK_MONOTONIC times of arrival in the engine's queue and of the first schedule (with the first output)."""


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges now, and counters that only grow."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of KV blocks in use by requests, 0 to 1."""
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens found there."""
    num_steps: int = 0
    num_compilations: int = 0
    """Graph compilations since readiness; 0 is the promise."""
    num_jit_events: int = 0
    """Triton kernels compiled since readiness; 0 is the promise."""
    step_seconds: dict[str, float] = {}
    """Sum of seconds spent per phase of a step. The worker's: prepare, forward, logits, sample, copy. The engine's,
    mostly at the same time: schedule, send, update, and wait (idle time as well)."""


class StepOutputs(msgspec.Struct, tag="outputs", array_like=True):
    outputs: list[RequestOutput]
    stats: EngineStats | None
    time_ns: int
    """CLOCK_MONOTONIC when the engine sent this."""


class EngineReady(msgspec.Struct, tag="ready", array_like=True):
    """The model can answer. Sent once to every API process after its `ApiReady`."""

    max_model_len: int
    num_blocks: int
    block_size: int
    attention_backend: str
    device: str
    dtype: str
    mode: str
    max_num_batched_tokens: int


FromEngine = StepOutputs | EngineReady


def _name(client_index: int) -> str:
    return f"api-{client_index}-in"


def sender(context: zmq.Context[Any], runtime_dir: str, client_index: int) -> Sender[FromEngine]:
    """The engine's end; connect after that client's `ApiReady`."""
    return Sender(context, endpoint(runtime_dir, _name(client_index)), bind=False)


def receiver(context: zmq.Context[Any], runtime_dir: str, client_index: int) -> Receiver[FromEngine]:
    """The API process' end."""
    return Receiver(context, endpoint(runtime_dir, _name(client_index)), FromEngine, bind=True)
