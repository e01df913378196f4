"""Says how far the reading of a large workload is: every prompt is made once for the digest, which would be silent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import typer
from rich.console import Console

_SILENT_S = 1.0
"""A workload that is read sooner is not worth a word."""
_AGAIN_S = 0.2


class Preparing:
    """Takes what a workload's reader tells (`workloads.base.OnRead`) and passes it on as words.

    `drawn`: the words are drawn over the ones before, as on a terminal, so they may come again and again; else there is
    one line per workload. `over`: called when a workload has been read.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        drawn: bool,
        over: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._drawn = drawn
        self._over = over
        self._clock = clock
        self._next_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done == total:
            self._over()
        elif done == 0:
            self._next_s = now + _SILENT_S
        elif now >= self._next_s:
            self._next_s = now + _AGAIN_S if self._drawn else float("inf")
            how = f"{done / total:.0%}" if self._drawn else "every prompt is made once, for the digest of all"
            self._say(f"preparing {total:,} requests: {how}")


def _write_line(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # who read it has gone; the work goes on
        typer.echo(text, err=True)


@contextlib.contextmanager
def preparing() -> Iterator[Preparing]:
    """On standard error: a line that is drawn again on a terminal and gone at the end, one plain line in a log."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Preparing(_write_line, drawn=False)
        return
    status = console.status("")

    def draw(text: str) -> None:
        status.update(text)
        status.start()

    try:
        yield Preparing(draw, drawn=True, over=status.stop)
    finally:
        status.stop()
