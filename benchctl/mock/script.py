"""What the mock does: when it writes which bytes, and where it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from server.errors import UserError

FailureKind = Literal["503", "reset", "error", "truncate", "abort"]
_KINDS = get_args(FailureKind)


class Stall(msgspec.Struct, frozen=True):
    """Before event number `event` (from 0) of every answer, `seconds` more than the script's interval."""

    event: int
    seconds: float


class Failure(msgspec.Struct, frozen=True):
    """Every `every`-th request (the first one being number 1) fails, when it has sent `after` token events."""

    kind: FailureKind
    every: int
    after: int = 0


class MockOptions(msgspec.Struct, kw_only=True, frozen=True):
    """The script of every answer."""

    host: str = "127.0.0.1"
    port: int = 0
    ttft_s: float = 0.0
    itl_s: float = 0.0
    """Between two writes."""
    events_per_write: int = 1
    tokens_per_event: int = 1
    stalls: tuple[Stall, ...] = ()
    failures: tuple[Failure, ...] = ()
    log: str | None = None
    """JSONL with the mock's own clock, one line per answer."""


def check_options(options: MockOptions) -> None:
    """Raise UserError for numbers that make no script."""
    for name, value in (("--ttft", options.ttft_s), ("--itl", options.itl_s)):
        if not 0 <= value < 1e6:
            raise UserError(f"{name} {value:g}: must be seconds, not negative")
    for name, count in (
        ("--events-per-write", options.events_per_write),
        ("--tokens-per-event", options.tokens_per_event),
    ):
        if not 1 <= count <= 10_000:
            raise UserError(f"{name} {count}: must be from 1 to 10000")


def parse_stalls(texts: Sequence[str]) -> tuple[Stall, ...]:
    """Stalls from `EVENT:SECONDS`, as `10:0.5`. Raises UserError."""
    stalls = []
    for text in texts:
        event, _, seconds = text.partition(":")
        try:
            stall = Stall(int(event), float(seconds))
        except ValueError:
            raise UserError(f"--stall {text}: expected EVENT:SECONDS, as 10:0.5") from None
        if stall.event < 0 or not 0 <= stall.seconds < 1e6:
            raise UserError(f"--stall {text}: neither part may be negative")
        stalls.append(stall)
    return tuple(stalls)


def parse_failures(texts: Sequence[str]) -> tuple[Failure, ...]:
    """Failures from `KIND:EVERY` or `KIND:EVERY:AFTER`, as `503:10` or `reset:7:3`. Raises UserError."""
    failures = []
    for text in texts:
        kind, *numbers = text.split(":")
        try:
            every, *rest = (int(number) for number in numbers)
        except ValueError:
            every, rest = 0, []
        if kind not in _KINDS or every < 1 or len(rest) > 1 or any(number < 0 for number in rest):
            raise UserError(f"--fail {text}: expected KIND:EVERY[:AFTER] with KIND one of {', '.join(_KINDS)}")
        failures.append(Failure(msgspec.convert(kind, FailureKind), every, *rest))
    return tuple(failures)
