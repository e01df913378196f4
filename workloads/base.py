"""What a workload is: a reproducible list of requests, when each is due, and a digest of both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

OnRead = Callable[[int, int], None]
"""Told how many requests were read, and of how many."""

_READ_AT_ONCE = 1024


class Message(msgspec.Struct, omit_defaults=True):
    """One chat message."""

    role: str
    content: str


class WorkloadRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One request, before a server or a model name is known.

    Exactly one of `prompt_token_ids`, `prompt` and `messages` is set.
    """

    index: int
    """Position in the workload; stable under slicing of the run."""
    prompt_token_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    prompt_tokens: int | None = None
    """Exact (token ids) or as counted with the tokenizer when the workload was built; None: not counted."""
    max_tokens: int
    """Output tokens asked for."""
    ignore_eos: bool = True
    """True: the server must generate exactly `max_tokens` (forced length)."""
    timestamp_s: float | None = None
    """Arrival relative to the start of the run, for traces; None: an arrival process decides."""
    conversation: int | None = None
    """Requests of one conversation are sent in order of `turn`, each after the answer to the one before."""
    turn: int = 0
    think_time_s: float = 0.0
    """Wait between the end of the turn before and this one."""
    append_reply: bool = False
    """True: `messages` holds only what this turn adds; the sender puts the earlier turns' messages before it, each
    turn's followed by the reply that the server gave (role assistant). False: `messages` is complete."""
    extra_body: dict[str, Any] = {}
    """Further fields of the request's JSON body (temperature, seed, ...)."""


class Workload(msgspec.Struct, kw_only=True):
    """The result of building a workload from a specification and a seed."""

    name: str
    parameters: dict[str, Any]
    """The full specification, defaults filled in, JSON-able."""
    seed: int
    requests: Sequence[WorkloadRequest]
    """A list, or a sequence that makes each request when it is looked at (large workloads of token ids)."""
    dropped: dict[str, int] = {}
    """Rows of the source that were not used, counted by reason."""
    tokenizer: str | None = None
    """Name of the tokenizer that lengths were counted with."""
    notes: list[str] = []
    """Approximations a reader of the result must know, e.g. "lengths clipped to 2048 tokens"."""

    @property
    def digest(self) -> str:
        """Hex SHA-256 over the requests in order; equal digests mean equal traffic (arrival process aside)."""
        return requests_digest(self.requests)


class RequestDigest:
    """SHA-256 over requests in order, each a line of canonical JSON."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()
        self._encoder = msgspec.json.Encoder(order="deterministic")

    def add(self, request: WorkloadRequest) -> None:
        self._hasher.update(self._encoder.encode(request))
        self._hasher.update(b"\n")

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()


def requests_digest(requests: Sequence[WorkloadRequest], on_read: OnRead | None = None) -> str:
    """Hex SHA-256 over `requests` in order."""
    digest = RequestDigest()
    for request in read_requests(requests, on_read):
        digest.add(request)
    return digest.hexdigest()


def read_requests(requests: Sequence[WorkloadRequest], on_read: OnRead | None) -> Iterator[WorkloadRequest]:
    """The requests in order. A generated workload makes each prompt for it, which takes half a minute for a million:
    `on_read` is told at the start, now and then, and at the end.
    """
    total = len(requests)
    for number, request in enumerate(requests):
        if on_read is not None and number % _READ_AT_ONCE == 0:
            on_read(number, total)
        yield request
    if on_read is not None:
        on_read(total, total)


def schedule_digest(times_s: Sequence[float]) -> str:
    """Hex SHA-256 of arrival times, rounded to nanoseconds."""
    hasher = hashlib.sha256()
    for time_s in times_s:
        hasher.update(round(time_s * 1e9).to_bytes(8, "little", signed=True))
    return hasher.hexdigest()
