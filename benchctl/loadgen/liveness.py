"""Whether the measured server outlived a load: after its death a closed loop burns the rest of its requests at once."""

from __future__ import annotations

import math
import socket

import httpx
import numpy as np

from benchctl.loadgen.endpoint import EndpointName, explain_refusal, parse_endpoint
from benchctl.loadgen.records import Cause, Rows
from benchctl.targets.base import control_client

_PROBE_S = 2.0
_TRAILING_SHARE = 0.1
_FEWEST_TRAILING = 5
"""Refused connections at the end of a load, and their share of its requests, that leave no doubt about the server even
when it is back by then."""
_SUSPICIOUS = frozenset({Cause.CONNECT, Cause.RESET, Cause.TRUNCATED, Cause.ERROR_EVENT, Cause.ABORTED})
"""Ends of a request that the death of a server may be behind."""
_NOT_OF_THE_SERVER = (Cause.INTERRUPTED, Cause.NO_PREVIOUS_TURN)
_DEAD_STATUS = frozenset({502, 503})


def why_gone(rows: Rows, url: str, endpoint: EndpointName) -> str | None:
    """Why the server at `url` counts as dead now that the load with these records has ended; None: it does not.

    The server is asked only when the last request of all failed in a way that its death explains, so that resets and
    refusals with answers after them are what they are: failed requests.
    """
    told = rows[~np.isin(rows["cause"], _NOT_OF_THE_SERVER)]
    if len(told) == 0:
        return None
    told = told[np.argsort(told["end_ns"], kind="stable")]
    last = told[-1]
    if int(last["cause"]) not in _SUSPICIOUS and not (last["cause"] == Cause.HTTP and last["http_status"] >= 500):
        return None
    if (why := _probe(url, endpoint)) is not None:
        return f"{url} {why}"
    others = np.flatnonzero(told["cause"] != Cause.CONNECT)
    trailing = len(told) - (int(others[-1]) + 1 if len(others) else 0)
    if trailing >= max(_FEWEST_TRAILING, math.ceil(_TRAILING_SHARE * len(told))):
        return f"{url} took no connection for the last {trailing} of {len(told)} requests"
    return None


def _probe(url: str, endpoint: EndpointName) -> str | None:
    """What shows that nobody serves there any more; None for everything that may have another reason."""
    target = parse_endpoint(url, endpoint)
    try:
        socket.create_connection((target.host, target.port), timeout=_PROBE_S).close()
    except TimeoutError:
        return None
    except OSError as error:
        return f"takes no connections any more: {explain_refusal(error, _PROBE_S)}"
    try:
        with control_client(url) as client:
            status = client.get("/health", timeout=_PROBE_S).status_code
    except httpx.HTTPError:
        return None
    return f"is not healthy any more: /health is answered with HTTP {status}" if status in _DEAD_STATUS else None
