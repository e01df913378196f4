"""When to schedule the next step while one runs.

Scheduled the moment it can be, a step is settled a whole step before it starts, and a request that arrives meanwhile
waits for it and for the one that runs. Scheduled just before the running one ends, it takes newcomers along. How long a
step of generating requests takes hardly changes from one to the next; the time that the host needs to schedule, send
and launch a step is measured too, and left with a margin, so that the device does not wait.
"""

from __future__ import annotations

MARGIN_NS = 1_000_000
"""Left on top of the host's own time: waking up from a wait is a matter of some 100 us."""
HOST_FACTOR = 1.5
"""How much more than last time the host may need."""
SHORT_STEP_NS = 1_500_000
"""From a step's result over the schedule of the next but one to its launch takes the processes 0.7 to 1.4 ms. Shorter
steps than that leave the device waiting unless one more is in flight."""


class Pacer:
    """Knows when the step in flight began, how long it will take, and when the next one is due to be scheduled."""

    def __init__(self) -> None:
        self._durations: list[int] = []
        """Of the last steps in a row without prompt tokens, two at most, ns."""
        self._kinds: list[bool] = []
        """Of the steps in flight, in order: whether every token of it is a generating request's."""
        self._began = 0
        self._host_ns = 0

    def scheduled(self, now_ns: int, only_decodes: bool) -> None:
        """A step has been sent at `now_ns`."""
        if not self._kinds:
            self._began = now_ns
        self._kinds.append(only_decodes)

    def finished(self, now_ns: int, host_ns: int) -> None:
        """The result of the oldest step in flight is here; the host had spent `host_ns` on scheduling and launching
        it. The device has gone on to the next one, if there is one."""
        if self._kinds.pop(0):
            self._durations = [*self._durations[-1:], now_ns - self._began]
        else:
            # The batch has changed.
            self._durations.clear()
        self._host_ns = host_ns
        self._began = now_ns

    def are_steps_short(self) -> bool:
        """Whether the last steps were so short that the host cannot keep up with one step's notice."""
        return len(self._durations) == 2 and max(self._durations) < SHORT_STEP_NS

    def due_ns(self) -> int:
        """When to schedule the step after the one in flight; in the past for one whose duration is not known."""
        if len(self._kinds) != 1 or not self._kinds[0] or len(self._durations) < 2:
            return 0
        return self._began + min(self._durations) - int(HOST_FACTOR * self._host_ns) - MARGIN_NS
