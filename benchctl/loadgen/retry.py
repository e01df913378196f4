"""Which requests get another attempt, and when."""

from __future__ import annotations

import random

from benchctl.loadgen.connection import Flight
from benchctl.loadgen.options import LoadOptions
from benchctl.loadgen.records import Cause

_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


def may_retry(flight: Flight, cause: Cause, options: LoadOptions) -> bool:
    """Whether a flight that failed so is sent again: not after its first token, and not more often than told."""
    if flight.attempts > options.retries or flight.answer.times:
        return False
    if flight.retry_after_s is not None and flight.retry_after_s > options.timeout_s:
        return False  # nobody waits that long for an answer
    if cause is Cause.HTTP:
        return flight.http_status in _RETRYABLE_STATUS
    return cause in (Cause.CONNECT, Cause.RESET)


def pause_s(flight: Flight) -> float:
    """Seconds until the next attempt: what the server asked for, else doubling from 0.25 to 8, 20% more or less."""
    if flight.retry_after_s is not None:
        return flight.retry_after_s
    return min(8.0, 0.25 * 2 ** (flight.attempts - 1)) * random.uniform(0.8, 1.2)
