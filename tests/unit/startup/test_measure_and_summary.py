"""Repeated starts: which caches each one gets, and medians that add up."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from benchctl.startup.measure import as_result, measure_starts, parse_arguments, start_config
from benchctl.startup.output import as_csv, as_json, as_markdown, as_table
from benchctl.startup.summary import Spread, summarize
from benchctl.targets import RunningServer
from reports.schema import PhaseTime, ServerInfo, StartupReport
from server.errors import UserError

CONFIG = start_config("tiny", "compile", "auto", {})


def report(kind: Any, healthy: float, **phases: float) -> StartupReport:
    """A start whose worker goes through `phases` one after the other, then idles until it is healthy."""
    rows, now = [], 0.0
    for name, seconds in phases.items():
        rows.append(PhaseTime(name=name, process="worker-0", start_s=now, duration_s=seconds))
        now += seconds
    return StartupReport(
        kind=kind, to_healthy_s=healthy, to_first_token_s=healthy, unaccounted_s=healthy - now, phases=rows
    )


class _Launcher:
    """Fills the caches like a server, and notes what it found there."""

    def __init__(self) -> None:
        self.found: list[tuple[str, bool]] = []
        self.stopped = 0

    def __call__(self, config: Any, *, cold_caches: Path, log_name: str, **_: Any) -> RunningServer:
        self.found.append((log_name, any(cold_caches.iterdir())))
        (cold_caches / "entry").touch()
        launcher = self

        class Server(RunningServer):
            def stop(self, timeout_s: float = 20.0) -> None:
                launcher.stopped += 1

        info = ServerInfo(attention_backend="TORCH_SDPA")
        return Server(url="", model="tiny", process=None, startup=report("unknown", 1.0, imports=1.0), info=info)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        (["cold", "warm"], [("cold-1.log", False), ("cold-2.log", False), ("warm-1.log", True), ("warm-2.log", True)]),
        (["cold"], [("cold-1.log", False), ("cold-2.log", False)]),
        (["warm"], [("fill.log", False), ("warm-1.log", True), ("warm-2.log", True)]),
    ],
)
def test_cold_starts_find_empty_caches_and_warm_ones_filled(
    kinds: list[Any], found: list[tuple[str, bool]], tmp_path: Path
) -> None:
    launcher = _Launcher()
    seen: list[tuple[str, int, int]] = []
    starts = measure_starts(
        CONFIG,
        kinds,
        2,
        log_dir=tmp_path,
        on_start=lambda *start: seen.append(start),
        timeout_s=1.0,
        launch=launcher,
    )
    assert launcher.found == found
    assert launcher.stopped == len(found) == len(seen)
    assert [r.kind for r in starts.reports] == [kind for kind in kinds for _ in range(2)]
    assert as_result(starts).cell_id == "benchctl/tiny/compile/TORCH_SDPA"


def test_medians_and_spread() -> None:
    reports = [report("cold", 10.0 + extra, imports=2.0 + extra, compile=7.5) for extra in (0.0, 1.0, 5.0)]
    reports.append(report("warm", 4.0, imports=2.5, weights=1.25))
    summary = summarize(reports)
    assert summary.to_healthy == {"cold": Spread(11.0, 10.0, 15.0, 3), "warm": Spread(4.0, 4.0, 4.0, 1)}
    assert [row.phase for row in summary.phases] == ["imports", "weights", "compile", "unaccounted"]
    rows = {row.phase: row.seconds for row in summary.phases}
    assert rows["imports"]["cold"] == Spread(3.0, 2.0, 7.0, 3)
    assert set(rows["compile"]) == {"cold"}
    assert summary.unaccounted_share("warm") == pytest.approx(0.25 / 4.0)
    assert summary.unaccounted_share("hot") is None


def test_what_no_server_reported_stays_unknown() -> None:
    unknown = StartupReport(kind="cold", to_healthy_s=2.0, to_first_token_s=None)
    summary = summarize([unknown])
    assert (summary.to_first_token, summary.unaccounted, summary.phases) == ({}, {}, [])
    assert "| exec to first token | – |" in as_markdown("title", summary)


def test_formats() -> None:
    from rich.console import Console

    reports = [report("cold", 2.0, imports=1.5), report("cold", 3.0, imports=1.75), report("warm", 1.0, imports=1.0)]
    summary = summarize(reports)
    markdown = as_markdown("tiny, eager", summary).splitlines()
    assert markdown[2] == "| phase | cold (n = 2) | range | warm (n = 1) | range |"
    assert "| imports | 1.62 s | 1.50 – 1.75 s | 1.00 s |  |" in markdown
    assert as_csv(summary).splitlines()[:2] == [
        "phase,kind,median_s,min_s,max_s,n",
        "imports,cold,1.625000,1.500000,1.750000,2",
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(as_table("tiny, eager", summary))
    text = console.export_text()
    assert "exec to healthy" in text
    assert "cold: 35.0% of the time to healthy is unaccounted" in text
    assert '"kind": "warm"' in as_json(as_result_of(reports), summary)


def as_result_of(reports: list[StartupReport]) -> Any:
    from benchctl.startup.measure import Starts

    return as_result(Starts(CONFIG, reports))


def test_server_options_after_the_dashes() -> None:
    given = ["--max-model-len", "512", "--dtype=float32", "--no-enable-prefix-caching", "--enforce-eager"]
    expected = {"max_model_len": "512", "dtype": "float32", "enable_prefix_caching": False, "enforce_eager": True}
    assert parse_arguments(given) == expected
    for wrong in (["stray"], ["--dtype=float32", "stray"], ["--no-async-scheduling", "stray"]):
        with pytest.raises(UserError, match="belongs to no option"):
            parse_arguments(wrong)
