"""What a person sees of a running matrix, on a terminal and in a log."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from benchctl.matrix.live import Estimate, LiveObserver, PlainObserver, make_observer, result_line
from benchctl.matrix.plan import Cell, plan_matrix
from benchctl.matrix.progress import Progress
from benchctl.matrix.suite import load_suite
from benchctl.matrix.traffic import TrafficFactory
from reports.schema import StartupReport, Status
from tests.unit.matrix.test_suite import MINIMAL, write
from tests.unit.reports import samples


def play(observer: LiveObserver | PlainObserver, tmp_path: Path) -> None:
    """The events of a matrix of which one cell was kept, one is measured and the others are still to come."""
    plan = plan_matrix(load_suite(write(tmp_path, MINIMAL)))
    server = plan.servers[0]
    traffic = TrafficFactory().prepare(plan.cells)
    report = StartupReport(kind="cold", to_healthy_s=2.5, to_first_token_s=2.75)
    progress = Progress(completed=3, failed=1, in_flight=2, total=9, output_tokens_per_s=123.0, ttft_p50_s=0.0123)
    with observer:
        observer.on_plan(plan, [samples.cell("eager", "TORCH_SDPA", 2.0)])
        observer.on_start(server, "cold")
        observer.on_started(server, report)
        observer.on_cell(server.cells[0], traffic[server.cells[0].id])
        observer.on_progress(server.cells[0], progress)
        if isinstance(observer, LiveObserver):
            observer._live.refresh()
        observer.on_result(samples.cell("compile", "TORCH_SDPA", 2.0, failed=2))
        if isinstance(observer, LiveObserver):
            observer._live.refresh()


def test_a_log_gets_a_line_per_event(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    observer = make_observer(console)
    assert isinstance(observer, PlainObserver)
    play(observer, tmp_path)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[:4] == [
        "suite suite: 4 cells on 2 servers, 1 kept from before",
        "starting benchctl/tiny/compile/TORCH_SDPA (cold)",
        "started benchctl/tiny/compile/TORCH_SDPA (cold): healthy after 2.50 s, first token after 2.75 s",
        "replaying 4 requests: benchctl/tiny/compile/TORCH_SDPA/synthetic/burst",
    ]
    assert lines[4].startswith("[2/4] ok ")
    assert re.search(r", \d+\.\d% within ttft:200ms tpot:20ms  2 requests failed$", lines[4])
    assert len(lines) == 5


def test_a_terminal_gets_a_live_view(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    observer = make_observer(console)
    assert isinstance(observer, LiveObserver)
    play(observer, tmp_path)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for shown in ("kept", "cold start", "2.50 s", "3/9", "123 tok/s", "12.3 ms", "2 in flight", "1 failed", "left"):
        assert shown in text, shown


@pytest.mark.parametrize("status", ["unsupported", "failed"])
def test_a_reason_is_not_markup(status: str) -> None:
    result = samples.cell("eager", "FLASH_ATTN", 2.0, status=status, reason="needs [cuda]")  # type: ignore[arg-type]
    assert result_line(result).plain.endswith("needs [cuda]")


def test_the_rest_is_estimated_from_what_runs_and_not_from_what_cannot(tmp_path: Path) -> None:
    suite = load_suite(write(tmp_path, MINIMAL), ["backends=['FLASH_ATTN','TORCH_SDPA','TRITON_ATTN']"])
    plan = plan_matrix(suite)
    cells = {name: [c for c in plan.cells if c.config.attention_backend == name] for name in suite.backends}
    assert [len(group) for group in cells.values()] == [4, 4, 4]
    estimate = Estimate()
    estimate.begin(plan, [], 100.0)

    def end(cell: Cell, status: Status, now: float) -> None:
        result = samples.cell("eager", "TORCH_SDPA", 2.0, status=status)
        result.cell_id, result.config = cell.id, cell.config
        estimate.add(result, now)

    for cell in cells["FLASH_ATTN"]:
        end(cell, "unsupported", 101.0)
    assert estimate.left_s(101.0) is None, "nothing has run: nothing is known"
    end(cells["TORCH_SDPA"][0], "ok", 111.0)
    assert estimate.left_s(111.0) == 70.0, "3 of this backend and 4 of the next, 10 s each"
    assert estimate.left_s(114.0) == 67.0
    assert estimate.left_s(999.0) == 60.0, "it takes longer than expected, but the others may not"
    end(cells["TRITON_ATTN"][0], "unsupported", 112.0)
    assert estimate.left_s(112.0) == 30.0, "the other three of TRITON_ATTN will not run either"
    end(cells["TRITON_ATTN"][1], "failed", 132.0)
    assert estimate.left_s(132.0) == 5 * 15.0, "one does run: the first was unsupported for another reason"
