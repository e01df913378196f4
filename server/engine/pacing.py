"""When to schedule the next step while one runs.

Scheduled the moment it can be, a step is settled a whole step before it starts, and a request that arrives meanwhile
waits for it and for the one that runs. Scheduled just before the running one ends, it takes newcomers along. How long a
step takes is foretold from the ones before: of generating requests alone it takes as long as the last, with prompts at
least as long as its tokens take at the best pace that was seen. The time that the host needs to schedule, send and
launch a step is measured too, and left with a margin, so that the device does not wait.
"""

from __future__ import annotations

from collections import deque

MARGIN_NS = 1_000_000
"""Left on top of the host's own time: waking up from a wait is a matter of some 100 us."""
HOST_FACTOR = 1.5
"""How much more than last time the host may need."""
SHORT_STEP_NS = 1_500_000
"""From a step's result over the schedule of the next but one to its launch takes the processes 0.7 to 1.4 ms. Shorter
steps than that leave the device waiting unless one more is in flight."""
PACE_TOKENS = 384
"""From so many tokens on a step with prompts shows how long a token takes: shorter ones wait for the weights."""
PACE_FACTOR = 0.95
"""How much sooner than foretold a step with prompts may end."""
_PACES = 8


class Pacer:
    """Knows when the step in flight began, how long it will take, and when the next one is due to be scheduled."""

    def __init__(self) -> None:
        self._durations: list[int] = []
        """Of the last steps without prompt tokens, two at most, ns."""
        self._num_decodes = 0
        """Requests of the last of them."""
        self._paces: deque[float] = deque(maxlen=_PACES)
        """Of the last steps of many tokens with prompts, ns per token."""
        self._steps: list[tuple[int, int]] = []
        """Of the steps in flight, in order: prompt tokens and generating requests."""
        self._began = 0
        self._host_ns = 0

    def scheduled(self, now_ns: int, prompt_tokens: int, num_decodes: int) -> None:
        """A step of so many prompt tokens and requests that generate has been sent at `now_ns`."""
        if not self._steps:
            self._began = now_ns
        self._steps.append((prompt_tokens, num_decodes))

    def finished(self, now_ns: int, host_ns: int) -> None:
        """The result of the oldest step in flight is here; the host had spent `host_ns` on scheduling and launching
        it. The device has gone on to the next one, if there is one."""
        prompt_tokens, num_decodes = self._steps.pop(0)
        duration = now_ns - self._began
        if not prompt_tokens:
            self._durations = [*self._durations[-1:], duration]
            self._num_decodes = num_decodes
        elif prompt_tokens + num_decodes >= PACE_TOKENS:
            self._paces.append(duration / (prompt_tokens + num_decodes))
        self._host_ns = host_ns
        self._began = now_ns

    def are_steps_short(self) -> bool:
        """Whether the last steps were so short that the host cannot keep up with one step's notice."""
        return len(self._durations) == 2 and max(self._durations) < SHORT_STEP_NS

    def due_ns(self, *, has_prompts: bool) -> int:
        """When to schedule the step after the one in flight; in the past for one whose duration is not known.

        `has_prompts`: prompts wait for it. A newcomer then gains nothing by a later schedule behind a step with
        prompts, and the device could only lose.
        """
        if len(self._steps) != 1 or (has_prompts and self._steps[0][0]):
            return 0
        duration = self._foretold(*self._steps[0])
        return self._began + duration - int(HOST_FACTOR * self._host_ns) - MARGIN_NS if duration else 0

    def _foretold(self, prompt_tokens: int, num_decodes: int) -> int:
        """The least that a step will take, ns; 0: not known."""
        duration = 0
        # A batch that has shrunk by more than a few may be far quicker.
        if len(self._durations) == 2 and 4 * num_decodes >= 3 * self._num_decodes:
            duration = min(self._durations)
        if prompt_tokens and self._paces:
            duration = max(duration, int(PACE_FACTOR * min(self._paces) * (prompt_tokens + num_decodes)))
        return duration
