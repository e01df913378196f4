"""What `benchctl serve` shows: a live start-up display for people, JSON lines for machines."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from benchctl.lossy import LossyStderr
from server.child import LogMessage, ProgressMessage, ReadyMessage, SpanMessage, StatusMessage
from server.startup import StartupTimeline
from server.timeline import Span

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.tree import Tree

# Phases below this are summed up in the tree: a start has hundreds of graph captures of some milliseconds.
_TREE_MIN_S = 0.005
_LOG_PART_MIN_S = 1.0


class ConsoleObserver:
    """Progress bars while starting, then the tree of phases, then the children's log lines."""

    def __init__(self) -> None:
        # Rich is imported at the first event: the children are already starting by then.
        self._stderr = LossyStderr()
        self._console: Console | None = None
        self._progress: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def _ensure(self) -> tuple[Console, Progress]:
        if self._console is None or self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._console = Console(file=self._stderr, highlight=False)  # type: ignore[arg-type]
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.fields[process]:<10}"),
                TextColumn("{task.description:<28}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                disable=not self._console.is_terminal,
            )
            self._progress.start()
        return self._console, self._progress

    def on_status(self, process: str, message: StatusMessage) -> None:
        console, progress = self._ensure()
        if isinstance(message, ProgressMessage):
            key = (process, message.name)
            amount = _amount(message)
            if key not in self._tasks:
                self._tasks[key] = progress.add_task(message.name, total=message.total, process=process, amount=amount)
            progress.update(self._tasks[key], completed=message.done, total=message.total, amount=amount)
        elif isinstance(message, SpanMessage) and not console.is_terminal:
            span = message.span
            seconds = (span.end_ns - span.start_ns) / 1e9
            # Parts of phases only when long: a compilation of half a minute must not look like a hang.
            if seconds >= (_LOG_PART_MIN_S if "/" in span.name else _TREE_MIN_S):
                self._print(f"{span.process:<10} {span.name}: {seconds:.2f} s")
        elif isinstance(message, LogMessage):
            self._print(f"{process:<10} {message.level}: {message.text}")

    def on_stderr(self, process: str, line: str) -> None:
        self._print(line)

    def on_ready(self, url: str, timeline: StartupTimeline) -> None:
        from rich.text import Text

        console, progress = self._ensure()
        progress.stop()
        console.print(startup_tree(timeline))
        seconds = (timeline.healthy_ns - timeline.exec_ns) / 1e9
        console.print(Text.assemble(("Ready", "bold green"), f" after {seconds:.2f} s: {url}"))

    def on_stopping(self, reason: str) -> None:
        self._print(f"Stopping on {reason}")

    def on_failure(self, text: str, tail: list[str]) -> None:
        self._stop_progress()
        # The tail was printed as it came; on a failure the reason must be the last thing on the screen.
        self._print(f"benchctl: {text}")

    def on_restart(self, pause_s: float) -> None:
        self._print(f"Restarting in {pause_s:g} s")

    def close(self) -> None:
        self._stop_progress()
        self._stderr.close()

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _print(self, text: str) -> None:
        console, _ = self._ensure()
        console.print(text, markup=False, soft_wrap=True)


class JsonObserver:
    """Every event as one JSON line on stderr."""

    def __init__(self) -> None:
        self._stderr = LossyStderr()

    def on_status(self, process: str, message: StatusMessage) -> None:
        if isinstance(message, SpanMessage):
            span = message.span
            seconds = (span.end_ns - span.start_ns) / 1e9
            self._write("info", process, f"phase {span.name}", phase=span.name, seconds=seconds, **span.attributes)
        elif isinstance(message, ProgressMessage):
            self._write("debug", process, message.name, done=message.done, total=message.total, unit=message.unit)
        elif isinstance(message, ReadyMessage):
            self._write("info", process, "ready", **message.info)
        elif isinstance(message, LogMessage):
            self._write(message.level, process, message.text)

    def on_stderr(self, process: str, line: str) -> None:
        if line.startswith("{") and line.endswith("}"):
            self._write_line(line)
        else:  # a traceback, or a library that prints
            self._write("info", process, line)

    def on_ready(self, url: str, timeline: StartupTimeline) -> None:
        seconds = (timeline.healthy_ns - timeline.exec_ns) / 1e9
        self._write("info", "supervisor", "ready", url=url, seconds=seconds)

    def on_stopping(self, reason: str) -> None:
        self._write("info", "supervisor", f"stopping on {reason}")

    def on_failure(self, text: str, tail: list[str]) -> None:
        self._write("error", "supervisor", text, tail=tail)

    def on_restart(self, pause_s: float) -> None:
        self._write("info", "supervisor", f"restarting in {pause_s:g} s")

    def close(self) -> None:
        self._stderr.close()

    def _write(self, level: str, process: str, message: str, **fields: object) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        entry = {"time": stamp, "level": level, "process": process, "message": message, **fields}
        self._write_line(json.dumps(entry, ensure_ascii=False, default=str))

    def _write_line(self, line: str) -> None:
        self._stderr.write(line + "\n")
        self._stderr.flush()


def startup_tree(timeline: StartupTimeline) -> Tree:
    """The start-up timeline as a Rich tree: process, phase, seconds, offset from exec, cache hits."""
    from rich.tree import Tree

    total = (timeline.healthy_ns - timeline.exec_ns) / 1e9
    root = Tree(f"start-up: {total:.2f} s from exec to healthy")
    processes = list(dict.fromkeys(span.process for span in timeline.spans))
    for process in processes:
        branch = root.add(process)
        spans = [span for span in timeline.spans if span.process == process]
        _add_spans(branch, spans, timeline.exec_ns, "")
    share = timeline.unaccounted_ns / max(1, timeline.healthy_ns - timeline.exec_ns)
    root.add(f"unaccounted: {timeline.unaccounted_ns / 1e9:.2f} s ({share:.1%})")
    return root


def _add_spans(branch: Tree, spans: list[Span], exec_ns: int, prefix: str) -> None:
    small_count, small_ns = 0, 0
    for span in spans:
        name = span.name.removeprefix(prefix)
        if not span.name.startswith(prefix) or ("/" in name and _has_parent(span, spans, prefix)):
            continue
        duration = (span.end_ns - span.start_ns) / 1e9
        if duration < _TREE_MIN_S:
            small_count, small_ns = small_count + 1, small_ns + span.end_ns - span.start_ns
            continue
        notes = "".join(f" {key}={value}" for key, value in span.attributes.items())
        child = branch.add(
            f"{name}: {duration:.2f} s  [dim]at {(span.start_ns - exec_ns) / 1e9:.2f} s{_escape(notes)}[/dim]"
        )
        _add_spans(child, spans, exec_ns, span.name + "/")
    if small_count:
        branch.add(f"[dim]{small_count} shorter: {small_ns / 1e9:.3f} s[/dim]")


def _has_parent(span: Span, spans: list[Span], prefix: str) -> bool:
    """Whether a recorded span below `prefix` is an ancestor of `span`."""
    return any(
        other.name.startswith(prefix) and span.name.startswith(other.name + "/") and other.name + "/" != prefix
        for other in spans
    )


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _amount(message: ProgressMessage) -> str:
    if message.unit == "bytes":
        return f"{message.done / 1e6:,.0f}/{message.total / 1e6:,.0f} MB"
    return f"{message.done:,.0f}/{message.total:,.0f} {message.unit}".rstrip()
