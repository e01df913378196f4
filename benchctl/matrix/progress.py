"""What a load says of itself while it runs."""

from __future__ import annotations

import msgspec


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
