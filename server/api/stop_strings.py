"""Stop strings: end a text where one is complete, and let no part of one out before."""

from __future__ import annotations


class StopStrings:
    """Watches one growing text for stop strings.

    The result does not depend on how the text is cut into pieces: the string that is complete first wins, of two that
    end together the longer one. Text that may be the beginning of a stop string is held back until that is decided,
    unless the string is to be part of the output anyway.
    """

    __slots__ = ("_held", "_include", "_longest", "_sent", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], include_in_output: bool) -> None:
        # Longest first, so that of those that end together the first found is kept.
        self._stops = sorted(stops, key=len, reverse=True)
        self._longest = len(self._stops[0])
        self._include = include_in_output
        self._held = ""
        self._sent = 0
        self.matched: str | None = None

    def push(self, text: str, *, check: bool = True) -> str:
        """Text that may go out after `text` has come; sets `matched` when a stop string is complete.

        `check=False`: `text` belongs to the tokens before `min_tokens`, within which no stop string may end.
        """
        window = self._held + text
        known = len(self._held)
        if not check:
            # A stop string may begin here and end later, so the tail is still watched.
            return self._release(window)
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # One that ended within the text that is already known would have been found then.
            begin = window.find(stop, max(0, known - len(stop) + 1))
            if begin >= 0 and (best is None or begin + len(stop) < best[0]):
                best = (begin + len(stop), begin, stop)
        if best is not None:
            end, begin, self.matched = best
            out = window[self._sent : end if self._include else begin]
            self._held = ""
            return out
        return self._release(window)

    def _release(self, window: str) -> str:
        """Let out what cannot be part of a stop string; keep the longest suffix that begins one."""
        keep = 0
        for size in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[-size:]
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stops):
                keep = size
                break
        out = window[self._sent :] if self._include else window[self._sent : len(window) - keep]
        self._held = window[len(window) - keep :] if keep else ""
        self._sent = keep if self._include else 0
        return out

    def flush(self) -> str:
        """The text held back, when the generation ends without a stop string."""
        out = self._held[self._sent :]
        self._held = ""
        self._sent = 0
        return out
