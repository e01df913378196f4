"""Finds children that live but do nothing: stopped by a signal, or with a main loop that no longer turns."""

from __future__ import annotations

from pathlib import Path

from server.pulse import Pulse

CHECK_INTERVAL_S = 0.5
STOPPED_LIMIT_S = 2.0
"""How long a child may stay stopped (SIGSTOP): clients must hear of it within 5 s."""
SILENCE_LIMIT_S = 30.0
"""How long a main loop that has begun to beat may pause. Loops beat every second; what is long (a compilation, a step
on the device) happens in the worker, which does not beat: its steps have a limit of their own in the engine."""
_STOPPED = b"T"
# A debugger holds it: that is nobody's fault.
_TRACED = b"t"
# A check that comes this late says that the supervisor was suspended, with its children or without.
_SUSPENDED_S = 5.0


class Watch:
    """Watches one child; `check` is to be called every `CHECK_INTERVAL_S`."""

    def __init__(self, pid: int, pulse: Pulse) -> None:
        self._pid = pid
        self._pulse = pulse
        self._beats = 0
        self._checked = self._beat_at = 0.0
        self._stopped_at: float | None = None

    def check(self, now: float) -> str | None:
        """What is wrong with the child at `now` (seconds of the monotonic clock); None while all is well."""
        state = _state(self._pid)
        suspended = now - self._checked > _SUSPENDED_S or state == _TRACED
        self._checked = now
        beats = self._pulse.read()
        if beats != self._beats or suspended:
            self._beats, self._beat_at = beats, now
        if state != _STOPPED:
            self._stopped_at = None
        elif self._stopped_at is None or suspended:
            self._stopped_at = now
        if self._stopped_at is not None and now - self._stopped_at >= STOPPED_LIMIT_S:
            return f"has been stopped by a signal for {STOPPED_LIMIT_S:g} s"
        if self._beats and now - self._beat_at >= SILENCE_LIMIT_S:
            return f"has not responded for {SILENCE_LIMIT_S:g} s"
        return None

    def close(self) -> None:
        self._pulse.close()


def _state(pid: int) -> bytes:
    """The letter of the process' state in /proc, see proc(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:  # gone: its pidfd tells
        return b"X"
