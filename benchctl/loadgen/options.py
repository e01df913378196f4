"""What a load run is told, and what comes out of it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from benchctl.loadgen.endpoint import EndpointName
from reports.schema import LoadMetrics

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_LAG_BOUND_S = 0.005


_DENSE_RATE = 250.0
"""Requests per second from which two processes send: a write that must wake the server's process on another core takes
up to 100 us on a virtual machine, in which the next arrival waits; at this rate it does so for one gap in forty."""


def default_workers(offered_rate: float | None) -> int:
    """Half of the cores that this process may use, between 1 and 8: the server and the kernel need the rest.

    Two at the least for `offered_rate` (requests per second of an open loop) above 250, on two cores or more.
    """
    cores = len(os.sched_getaffinity(0))
    least = 2 if cores > 1 and offered_rate is not None and offered_rate > _DENSE_RATE else 1
    return max(least, min(8, cores // 2))


class LoadOptions(msgspec.Struct, kw_only=True, frozen=True):
    """How requests are sent and judged; the workload and its schedule say which and when."""

    url: str
    """Base URL, with or without `/v1`."""
    model: str
    endpoint: EndpointName = "completions"
    api_key: str | None = None
    workers: int | None = None
    """Processes that send; None: `default_workers()`."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """From sending a request to the end of its answer."""
    connect_timeout_s: float = 10.0
    retries: int = 0
    """Further attempts after connect errors, resets before the first token, 429 and 5xx; counted in the result."""
    force_lengths: bool = True
    """Send `ignore_eos` with requests of forced length."""
    continuous_usage: bool = False
    """Ask for the token count of every event (`continuous_usage_stats`), where events carry several tokens."""
    tokenizer: str | None = None
    """Recounts output tokens where the server gives no usage."""
    slos: tuple[str, ...] = ()
    warmup: str = "0s"
    """Excluded at the start: requests scheduled in the first `5s`, the first `20` requests, or the first `10%`."""
    cooldown: str = "0s"
    """Excluded at the end, counted back from the last scheduled request."""
    lag_bound_s: float = DEFAULT_LAG_BOUND_S


class LoadOutcome(msgspec.Struct, kw_only=True):
    """The result of `run_load`."""

    records: Path
    metrics: LoadMetrics
    interrupted: bool
    """Cancelled before its end; the metrics cover what had ended until then."""
    aborted: str | None = None
    """Why the load did not come to its end, or None: the server is gone, a worker died, the disk is full."""
    server_gone: bool = False
    """Whether that is because of the server."""
    error_details: dict[str, str] = {}
    """One message of the server or the system per cause of failure."""
