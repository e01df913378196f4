"""What a person sees while a matrix runs: a live table on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from benchctl.matrix.plan import Cell, Plan, ServerPlan
from benchctl.matrix.progress import Progress
from benchctl.matrix.traffic import Traffic
from reports import formatting
from reports.console import STYLES
from reports.goodput import within
from reports.metrics import METRICS
from reports.schema import CellConfig, CellResult, StartupReport


def make_observer(console: Console) -> LiveObserver | PlainObserver:
    """The live view for a terminal, else lines."""
    return LiveObserver(console) if console.is_terminal else PlainObserver(console)


def result_line(result: CellResult) -> Text:
    """One finished cell: status, id, and its figures or its reason."""
    text = Text.assemble((f"{result.status:<11} ", STYLES[result.status]), (result.cell_id, "bold"))
    if result.metrics is not None and result.metrics.completed:
        shown = [METRICS[key] for key in ("output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s")]
        figures = ", ".join(f"{metric.label} {metric.text(result)}" for metric in shown)
        met = "".join(f", {within(goodput)}" for goodput in result.metrics.goodput)
        text.append(f"  {figures}{met}")
        if result.metrics.failed:
            text.append(f"  {result.metrics.failed} requests failed", "red")
    if result.reason:
        text.append(f"  {result.reason}", "dim")
    return text


class PlainObserver:
    """One line per event, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._done = 0
        self._total = 0

    def __enter__(self) -> PlainObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def on_plan(self, plan: Plan, reused: list[CellResult]) -> None:
        self._total = len(plan.cells)
        self._done = len(reused)
        kept = f", {len(reused)} kept from before" if reused else ""
        self._say(f"suite {plan.suite.name}: {self._total} cells on {len(plan.servers)} servers{kept}")

    def on_start(self, server: ServerPlan, kind: str) -> None:
        self._say(f"starting {server.name} ({kind})" if kind != "unknown" else f"connecting to {server.name}")

    def on_started(self, server: ServerPlan, report: StartupReport | None) -> None:
        if report is not None:
            healthy, token = (formatting.seconds(v) for v in (report.to_healthy_s, report.to_first_token_s))
            self._say(f"started {server.name} ({report.kind}): healthy after {healthy}, first token after {token}")

    def on_cell(self, cell: Cell, traffic: Traffic) -> None:
        self._say(f"replaying {traffic.info.requests} requests: {cell.id}")

    def on_progress(self, cell: Cell, progress: Progress) -> None:
        return None

    def on_result(self, result: CellResult) -> None:
        self._done += 1
        line = Text(f"[{self._done}/{self._total}] ", "dim")
        self._console.print(line.append_text(result_line(result)), soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class Estimate:
    """How long the rest of a matrix may take: the mean time of the cells that ran, their servers' starts included, for
    each cell that is left. Cells that cannot run take no time, so they count on neither side: not those that turned out
    to be unsupported, and not those to come with an engine and a backend that were.
    """

    def __init__(self) -> None:
        self._left: dict[str, tuple[str, str | None]] = {}
        self._unsupported: set[tuple[str, str | None]] = set()
        self._ran = 0
        self._ran_s = 0.0
        self._since = 0.0

    def begin(self, plan: Plan, reused: list[CellResult], now: float) -> None:
        """`now`: seconds of any clock, here and in what follows."""
        kept = {result.cell_id for result in reused}
        self._left = {cell.id: _kind(cell.config) for cell in plan.cells if cell.id not in kept}
        self._since = now

    def add(self, result: CellResult, now: float) -> None:
        """A cell has ended."""
        self._left.pop(result.cell_id, None)
        if result.status == "unsupported":
            self._unsupported.add(_kind(result.config))
        else:
            self._ran += 1
            self._ran_s += now - self._since
            self._unsupported.discard(_kind(result.config))  # it was the mode or the model
        self._since = now

    def left_s(self, now: float) -> float | None:
        """Seconds, or None while no cell has run. Between two cells it goes down as time passes."""
        if self._ran == 0:
            return None
        each = self._ran_s / self._ran
        number = sum(kind not in self._unsupported for kind in self._left.values())
        return max(0.0, number * each - min(each, now - self._since)) if number else 0.0


def _kind(config: CellConfig) -> tuple[str, str | None]:
    return config.engine, config.attention_backend


class LiveObserver:
    """Finished cells scroll by; below them what runs now, its figures, and how long the rest may take."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = Spinner("dots")
        self._plan: Plan | None = None
        self._done = 0
        self._activity = Text("preparing")
        self._progress: Progress | None = None
        self._server_began = time.monotonic()
        self._estimate = Estimate()
        # Last: it renders once in its constructor.
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveObserver:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_plan(self, plan: Plan, reused: list[CellResult]) -> None:
        self._plan = plan
        self._done = len(reused)
        self._estimate.begin(plan, reused, time.monotonic())
        for result in reused:
            self._console.print(Text("kept        ", "dim").append(result.cell_id), soft_wrap=True)

    def on_start(self, server: ServerPlan, kind: str) -> None:
        self._progress = None
        self._server_began = time.monotonic()
        how = f"{kind} start of" if kind != "unknown" else "connecting to"
        self._activity = Text.assemble((f"{how} ", "dim"), (server.name, "bold"))

    def on_started(self, server: ServerPlan, report: StartupReport | None) -> None:
        if report is not None:
            line = Text.assemble((f"{report.kind + ' start':<11} ", "cyan"), (server.name, "bold"))
            line.append(f"  healthy after {formatting.seconds(report.to_healthy_s)}")
            line.append(f", first token after {formatting.seconds(report.to_first_token_s)}")
            self._console.print(line, soft_wrap=True)

    def on_cell(self, cell: Cell, traffic: Traffic) -> None:
        self._server_began = time.monotonic()
        self._activity = Text.assemble(("replaying ", "dim"), (cell.id, "bold"))

    def on_progress(self, cell: Cell, progress: Progress) -> None:
        self._progress = progress

    def on_result(self, result: CellResult) -> None:
        self._done += 1
        self._estimate.add(result, time.monotonic())
        self._progress = None
        self._console.print(result_line(result), soft_wrap=True)

    def _render(self) -> RenderableType:
        if self._plan is None:
            return Text("")
        total = len(self._plan.cells)
        head = Table.grid(padding=(0, 1))
        since = formatting.whole_seconds(time.monotonic() - self._server_began)
        head.add_row(self._spinner, self._activity, Text(since, "dim"))
        rows: list[RenderableType] = [head]
        if self._progress is not None:
            rows.append(_progress_row(self._progress))
        foot = Table.grid(padding=(0, 1))
        foot.add_row(
            Text("  cells", "dim"), ProgressBar(total, self._done, width=24), Text(f"{self._done}/{total}"), self._eta()
        )
        rows.append(foot)
        return Group(*rows)

    def _eta(self) -> Text:
        left = self._estimate.left_s(time.monotonic())
        return Text("" if left is None else f"about {formatting.whole_seconds(left)} left", "dim")


def _progress_row(progress: Progress) -> Table:
    row = Table.grid(padding=(0, 1))
    failed = Text(f"{progress.failed} failed", "red") if progress.failed else Text("")
    row.add_row(
        Text("  load ", "dim"),
        ProgressBar(max(progress.total or 0, progress.completed, 1), progress.completed, width=24),
        Text(f"{progress.completed}/{progress.total or '?'}"),
        Text(f"{formatting.significant(progress.output_tokens_per_s)} tok/s", "green"),
        Text(f"TTFT {formatting.seconds(progress.ttft_p50_s)}", "cyan"),
        Text(f"{progress.in_flight} in flight", "dim"),
        failed,
    )
    return row
