"""`--restart on-failure`: a failed server is started again, after a pause that grows while it keeps failing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STEADY_S = 60.0
"""A server that has served for so long begins again with the shortest pause when it fails."""
# The second is what a start ends with that lacks something: memory that is not free again yet, say.
_FAILURES = (1, 2)


@dataclass(frozen=True)
class Outcome:
    """How one run of the server ended."""

    exit_code: int
    served_s: float | None
    """Seconds from readiness to the end; None: it never was ready."""


def run_with_restarts(
    run: Callable[[], Outcome], announce: Callable[[float], None], pause: Callable[[float], int | None] | None = None
) -> int:
    """Call `run` until it ends in another way than by failure; its exit code.

    A first start that fails is not repeated: what has never worked will not work in a second either. `announce` is
    told of every pause, in seconds; `pause` waits and returns the exit code of a signal that ended it.
    """
    wait = pause or pause_for
    next_pause = FIRST_PAUSE_S
    has_served = False
    while True:
        outcome = run()
        has_served = has_served or outcome.served_s is not None
        if outcome.exit_code not in _FAILURES or not has_served:
            return outcome.exit_code
        if outcome.served_s is not None and outcome.served_s >= STEADY_S:
            next_pause = FIRST_PAUSE_S
        announce(next_pause)
        interrupted = wait(next_pause)
        if interrupted is not None:
            return interrupted
        next_pause = min(2 * next_pause, LONGEST_PAUSE_S)


def pause_for(seconds: float) -> int | None:
    """Sleep; 128 + number of the SIGINT or SIGTERM that came meanwhile, None if none did."""
    numbers = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        received = signal.sigtimedwait(numbers, seconds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return None if received is None else 128 + received.si_signo
