"""What a workload looks like: counts, length percentiles, rate curve, samples. Pure functions over its requests."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from workloads.arrivals import Schedule
from workloads.base import OnRead, RequestDigest, Workload, WorkloadRequest, read_requests

_SAMPLE_CHARACTERS = 160
_SAMPLE_TOKENS = 12
_BARS = "▁▂▃▄▅▆▇█"


class LengthSummary(msgspec.Struct, kw_only=True):
    """Of one length over all requests."""

    count: int
    total: int
    mean: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int


class RateCurve(msgspec.Struct, kw_only=True):
    """Arrivals per second in buckets of equal width from 0."""

    bucket_s: float
    rates: list[float]
    peak: float
    mean: float


class Sample(msgspec.Struct, kw_only=True):
    """One request, its prompt cut short."""

    index: int
    prompt: str
    prompt_tokens: int | None
    max_tokens: int
    timestamp_s: float | None = None
    conversation: int | None = None
    turn: int = 0


class WorkloadSummary(msgspec.Struct, kw_only=True):
    """Everything that `benchctl workload show` prints."""

    name: str
    parameters: dict[str, Any]
    seed: int
    digest: str
    tokenizer: str | None
    num_requests: int
    num_conversations: int
    """Conversations of several turns and single requests that name a conversation; 0 when none does."""
    dropped: dict[str, int]
    notes: list[str]
    prompt_tokens: LengthSummary | None
    """None: no prompt was counted."""
    prompt_characters: LengthSummary | None
    """Of text prompts and messages; None: all are token ids."""
    max_tokens: LengthSummary | None
    arrival: dict[str, Any] | None
    schedule_digest: str | None
    rate_curve: RateCurve | None
    samples: list[Sample]


def summarise(
    workload: Workload, schedule: Schedule | None, *, samples: int = 3, on_read: OnRead | None = None
) -> WorkloadSummary:
    """Summarise in one pass over the requests; sample requests are spread evenly over the workload."""
    prompt_tokens, characters, max_tokens = array("q"), array("q"), array("q")
    conversations: set[int] = set()
    n = len(workload.requests)
    positions = {position * (n - 1) // max(1, samples - 1) for position in range(min(samples, n))}
    chosen = []
    digest = RequestDigest()
    for position, request in enumerate(read_requests(workload.requests, on_read)):
        digest.add(request)
        max_tokens.append(request.max_tokens)
        if request.prompt_tokens is not None:
            prompt_tokens.append(request.prompt_tokens)
        if request.prompt_token_ids is None:
            characters.append(len(_text(request)))
        if request.conversation is not None:
            conversations.add(request.conversation)
        if position in positions:
            chosen.append(_sample(request))
    return WorkloadSummary(
        name=workload.name,
        parameters=workload.parameters,
        seed=workload.seed,
        digest=digest.hexdigest(),
        tokenizer=workload.tokenizer,
        num_requests=n,
        num_conversations=len(conversations),
        dropped=workload.dropped,
        notes=workload.notes,
        prompt_tokens=_lengths(prompt_tokens),
        prompt_characters=_lengths(characters),
        max_tokens=_lengths(max_tokens),
        arrival=None if schedule is None else schedule.spec,
        schedule_digest=None if schedule is None else schedule.digest,
        rate_curve=None if schedule is None or schedule.times_s is None else rate_curve(schedule.times_s),
        samples=chosen,
    )


def rate_curve(times_s: npt.NDArray[np.float64], buckets: int = 60) -> RateCurve | None:
    """Arrivals per second over `buckets` equal buckets of [0, last arrival]; None when all is due at once."""
    end = float(times_s[-1]) if len(times_s) else 0.0
    if end <= 0:
        return None
    counts, edges = np.histogram(times_s, bins=buckets, range=(0.0, end))
    width = float(edges[1] - edges[0])
    rates = counts / width
    return RateCurve(bucket_s=width, rates=rates.tolist(), peak=float(rates.max()), mean=len(times_s) / end)


def sparkline(values: list[float]) -> str:
    """One character a value, from an empty space for 0 to a full block for the greatest."""
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(" " if value <= 0 else _BARS[min(7, int(value / top * 8))] for value in values)


def _lengths(values: array[int]) -> LengthSummary | None:
    if not values:
        return None
    lengths = np.frombuffer(values, dtype=np.int64)
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
    return LengthSummary(
        count=len(lengths),
        total=int(lengths.sum()),
        mean=float(lengths.mean()),
        min=int(lengths.min()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=int(lengths.max()),
    )


def _text(request: WorkloadRequest) -> str:
    if request.messages is not None:
        return "\n".join(f"{message.role}: {message.content}" for message in request.messages)
    return request.prompt or ""


def _sample(request: WorkloadRequest) -> Sample:
    if request.prompt_token_ids is not None:
        ids = request.prompt_token_ids
        prompt = " ".join(map(str, ids[:_SAMPLE_TOKENS])) + (" ..." if len(ids) > _SAMPLE_TOKENS else "")
    else:
        text = _text(request)
        prompt = text[:_SAMPLE_CHARACTERS] + ("..." if len(text) > _SAMPLE_CHARACTERS else "")
    return Sample(
        index=request.index,
        prompt=prompt,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        timestamp_s=request.timestamp_s,
        conversation=request.conversation,
        turn=request.turn,
    )
