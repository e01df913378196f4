"""API process -> engine core: new requests and aborts."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from server.ipc.sockets import Receiver, Sender, endpoint
from server.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    request_id: str
    """Unique within the server; `n > 1` and lists of prompts become one AddRequest per completion."""
    client_index: int
    """Which API process gets the outputs."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time_ns: int
    """CLOCK_MONOTONIC when the API process had read the request."""
    priority: int = 0
    """Smaller runs first under the `priority` policy."""


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    request_ids: list[str]


class ApiReady(msgspec.Struct, tag="ready", array_like=True):
    """API process `client_index` has bound its output socket and may be connected to."""

    client_index: int


ToEngine = AddRequest | AbortRequests | ApiReady

_NAME = "engine-in"


def sender(context: zmq.Context[Any], runtime_dir: str) -> Sender[ToEngine]:
    """The API process' end."""
    return Sender(context, endpoint(runtime_dir, _NAME), bind=False)


def receiver(context: zmq.Context[Any], runtime_dir: str) -> Receiver[ToEngine]:
    """The engine's end."""
    return Receiver(context, endpoint(runtime_dir, _NAME), ToEngine, bind=True)
