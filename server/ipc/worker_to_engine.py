"""GPU worker -> engine core: readiness and the results of a step."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from server.ipc.engine_to_api import TokenLogprobs
from server.ipc.sockets import Receiver, Sender, endpoint


class WorkerReady(msgspec.Struct, tag="ready", array_like=True):
    """The worker can run steps: weights loaded, graphs compiled and captured, KV cache allocated."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    attention_backend: str
    device: str
    dtype: str
    mode: str
    num_parameters: int


class StepResult(msgspec.Struct, tag="result", array_like=True):
    step_id: int
    request_ids: list[str]
    """Requests that sampled a token in this step, in batch order."""
    token_ids: list[int]
    """One sampled token per entry of `request_ids`."""
    logprobs: dict[str, TokenLogprobs]
    """For those that asked."""
    prompt_logprobs: dict[str, list[TokenLogprobs | None]]
    """Part of the prompt's log-probabilities that this step computed, in order; the engine joins the parts."""
    num_compilations: int = 0
    num_jit_events: int = 0
    """Counters since readiness."""
    step_seconds: dict[str, float] = {}
    """Seconds of this step per phase: prepare, forward, logits, sample, copy."""


FromWorker = WorkerReady | StepResult


def sender(context: zmq.Context[Any], runtime_dir: str) -> Sender[FromWorker]:
    """The worker's end."""
    return Sender(context, endpoint(runtime_dir, "worker-out"), bind=False)


def receiver(context: zmq.Context[Any], runtime_dir: str) -> Receiver[FromWorker]:
    """The engine's end (all ranks push into it)."""
    return Receiver(context, endpoint(runtime_dir, "worker-out"), FromWorker, bind=True)
