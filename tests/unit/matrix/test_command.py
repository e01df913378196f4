"""`benchctl matrix` itself: exit codes, what is listed, which reports are written."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import typer

from benchctl.commands.matrix import matrix
from reports.directory import ResultSet
from reports.schema import Status
from server.errors import UserError
from tests.unit.matrix.test_suite import MINIMAL, write
from tests.unit.reports import samples


class FakeRunner:
    """Comes back with cells of the given statuses at once."""

    statuses: tuple[Status, ...] = ()
    interrupted = False

    def __init__(self, *_: Any, **options: Any) -> None:
        FakeRunner.options = options

    def run(self) -> ResultSet:
        cells = [samples.cell("eager", f"B{n}", 2.0, status=status) for n, status in enumerate(self.statuses)]
        return ResultSet(title="made up", results=cells)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    monkeypatch.setattr("benchctl.matrix.runner.MatrixRunner", FakeRunner)
    output = tmp_path / "out"
    output.mkdir(exist_ok=True)
    try:
        matrix(suite=write(tmp_path, MINIMAL), output=output, **options)
    except typer.Exit as error:
        return error.exit_code
    return 0


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("ok",), 0),
        (("ok", "unsupported"), 0),
        (("unsupported",), 1),
        (("ok", "failed"), 1),
        (("ok", "timeout"), 1),
        (("ok", "invalid"), 1),
    ],
)
def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: tuple[Status, ...], code: int) -> None:
    monkeypatch.setattr(FakeRunner, "statuses", statuses)
    assert run(tmp_path, monkeypatch, resume=True) == code
    assert FakeRunner.options["resume"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "report.md", "report.csv"}


@pytest.mark.parametrize("statuses", [(), ("ok", "interrupted")])
def test_an_interrupt_is_130_with_or_without_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: tuple[Status, ...]
) -> None:
    monkeypatch.setattr(FakeRunner, "statuses", statuses)
    monkeypatch.setattr(FakeRunner, "interrupted", True)
    assert run(tmp_path, monkeypatch) == 130
    assert (tmp_path / "out" / "report.html").exists() == bool(statuses)


def test_bad_input_ends_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="input_len"):
        matrix(suite=write(tmp_path, MINIMAL), output=tmp_path / "out", assignments=["loads.0.workload.input_len=-1"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("loads.0.workload.foo=1", "unknown key `foo`"),
        ("loads.0.workload.input_len=-3", "input_len"),
        ('loads.0.arrivals=[{name="poisson", rate=0}]', "rate must be a number above 0"),
        ("loads.0.workload={name='synthetic', prompt_format='text'}", "prompt_format=text counts tokens"),
        ("loads.0.workload={name='sharegpt', path='/not/there'}", "its filter counts tokens"),
        ("loads.0.endpoint=chat", "token ids cannot go to the chat endpoint"),
        ('loads.0.arrivals=[{name="trace"}]', "the workload has no timestamps"),
        ("server.max_model_len=9999", "model 'tiny' takes 1 to 4096"),
        ('models=["tyni"]', "model 'tyni': neither a folder"),
    ],
)
@pytest.mark.parametrize("plan_only", [True, False])
def test_a_plan_refuses_what_a_run_does(tmp_path: Path, assignment: str, message: str, plan_only: bool) -> None:
    with pytest.raises(UserError, match=message):
        matrix(suite=write(tmp_path, MINIMAL), output=tmp_path / "out", assignments=[assignment], plan_only=plan_only)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workload", ["{name='sharegpt-like'}", "{name='synthetic', prompt_format='text'}"])
def test_a_plan_needs_no_model_that_would_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workload: str
) -> None:
    monkeypatch.setenv("BENCHCTL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    chosen = ['models=["smollm2-135m", "org/name"]', f"loads.0.workload={workload}", "loads.0.workload.num_requests=2"]
    matrix(suite=write(tmp_path, MINIMAL), plan_only=True, assignments=chosen)
    assert len(capsys.readouterr().out.splitlines()) == 8
    with pytest.raises(UserError, match="unknown key"):
        matrix(suite=write(tmp_path, MINIMAL), plan_only=True, assignments=[*chosen, "loads.0.workload.foo=1"])


def test_reports_are_written_before_anything_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FakeRunner, "statuses", ("ok",))
    monkeypatch.setattr("reports.console.print_report", no_room)
    with pytest.raises(OSError, match="No space"):
        run(tmp_path, monkeypatch)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "report.md", "report.csv"}


def test_suites_and_plans_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrix(list_suites=True)
    assert "quick      Compilation and attention backends" in capsys.readouterr().out
    matrix(suite=write(tmp_path, MINIMAL), plan_only=True, assignments=['only=["*/burst"]'])
    assert capsys.readouterr().out.splitlines() == [
        "benchctl/tiny/compile/TORCH_SDPA/synthetic/burst",
        "benchctl/tiny/eager/TORCH_SDPA/synthetic/burst",
    ]
