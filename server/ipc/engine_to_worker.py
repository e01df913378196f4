"""Engine core -> GPU worker: what to run in one step, as differences to the worker's persistent batch."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from server.ipc.sockets import Receiver, Sender, endpoint
from server.sampling_params import SamplingParams


class NewRequest(msgspec.Struct, array_like=True):
    """A request that the worker does not hold: seen first, or back after preemption."""

    request_id: str
    token_ids: list[int]
    """All tokens known so far: the prompt, and after a preemption the tokens generated before it."""
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[int]
    """Every block of the request so far, in order of position."""
    num_computed_tokens: int
    """Tokens whose keys and values are already in the cache (prefix-cache hits)."""


class ScheduleStep(msgspec.Struct, tag="step", array_like=True):
    """One step. Requests of the batch keep their place in the worker until `dropped_request_ids` names them.

    The worker appends the tokens it samples to its own copy of a request, so a decode step carries no token ids. A
    request samples in this step exactly when its computed + scheduled tokens reach all tokens it has; with
    asynchronous scheduling "all" includes the token that the step before is still sampling.
    """

    step_id: int
    new_requests: list[NewRequest]
    scheduled: dict[str, int]
    """request id -> number of tokens to compute now (>= 1); only these run. Sum <= token budget."""
    new_block_ids: dict[str, list[int]]
    """Blocks appended to the block table of requests that the worker already holds."""
    dropped_request_ids: list[str]
    """Finished, aborted or preempted: forget them, before anything else of this step is applied."""


def sender(context: zmq.Context[Any], runtime_dir: str, rank: int = 0) -> Sender[ScheduleStep]:
    """The engine's end."""
    return Sender(context, endpoint(runtime_dir, f"worker-{rank}-in"), bind=True)


def receiver(context: zmq.Context[Any], runtime_dir: str, rank: int = 0) -> Receiver[ScheduleStep]:
    """The worker's end."""
    return Receiver(context, endpoint(runtime_dir, f"worker-{rank}-in"), ScheduleStep, bind=False)
