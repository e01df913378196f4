"""What a load says of itself: how far it is, and what came of it."""

from __future__ import annotations

import msgspec

from reports.schema import LoadMetrics


class Progress(msgspec.Struct, kw_only=True, frozen=True):
    completed: int
    failed: int
    in_flight: int
    total: int | None
    """Requests of the whole load; None: it ends by time."""
    output_tokens_per_s: float | None
    """Over the last seconds."""
    ttft_p50_s: float | None
    """Over the last seconds."""


class Replayed(msgspec.Struct, kw_only=True, frozen=True):
    metrics: LoadMetrics
    aborted: str | None = None
    """Why the load gave up before its end; the metrics cover what there was until then."""
    error_details: dict[str, str] = {}
    """One message of the server or the system per cause of failed requests."""
