"""Stores: what goes in comes out, once; and `benchctl history` over them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchctl.cli import build_app
from benchctl.history.bisect import bisect_command, bisect_hints
from benchctl.history.record import Record, records_of
from benchctl.history.store import open_store
from reports.metrics import METRICS
from reports.results import write_result
from reports.schema import CellResult
from server.errors import UserError
from tests.unit.gate import factory


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A checkout with twelve commits."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number in range(12):
        git(folder, "commit", "-q", "--allow-empty", "-m", str(number))
    monkeypatch.chdir(folder)
    return folder, git(folder, "rev-list", "--reverse", "HEAD").split()


def results(folder: Path, commits: list[str], slow_from: int, step: int = 1) -> list[Path]:
    paths = []
    for number in range(0, len(commits), step):

        def made(result: CellResult, commit: str = commits[number]) -> None:
            result.provenance.git_commit = commit

        slowness = (1.2 if number >= slow_from else 1.0) * (1 + 0.001 * (number % 3))
        path = folder / f"run-{number:02d}"
        path.mkdir(parents=True)
        write_result(factory.result(slowness, started=number, change=made), path)
        paths.append(path)
    return paths


def run(*arguments: str) -> str:
    done = CliRunner().invoke(build_app(["history"]), ["history", *arguments], env={"COLUMNS": "160"})
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("store", ["history", "history.db"])
def test_from_results_to_the_plot_and_the_hint(repository: tuple[Path, list[str]], tmp_path: Path, store: str) -> None:
    _, commits = repository
    paths = [str(path) for path in results(tmp_path / "results", commits, 7)]
    where = str(tmp_path / store)
    assert "12 new, 0 there before" in run("add", *paths, "--store", where)
    assert "0 new, 12 there before" in run("add", *paths, "--store", where)
    assert run("ls", "--store", where).count("  1 cell, 1 measurement\n") == 12
    shown = run("plot", "--store", where, "--metric", "tpot_p50_s", "-o", str(tmp_path / "plot.html"))
    assert "+20%" in shown
    assert commits[7][:12] in shown
    page = (tmp_path / "plot.html").read_text()
    assert "Plotly.newPlot" in page
    assert 'src="http' not in page
    hint = run("bisect", "HEAD~11", "HEAD", "--store", where, "--metric", "tpot_p50_s")
    assert f"no commit between: {commits[7][:12]} made the change" in hint


def test_a_gap_in_the_history_is_bisected(repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, commits = repository
    cells = []
    for path in results(tmp_path / "results", commits, 7, step=4):
        from benchctl.gate.runs import load_run

        cells += load_run(path).cells.values()
    hint = bisect_hints(records_of(cells, folder), METRICS["tpot_p50_s"], "HEAD~11", "HEAD", folder)[0]
    assert (hint.good, hint.bad) == (commits[4], commits[8])
    assert hint.commits == commits[5:9]
    assert hint.next_commit == commits[6]
    command = bisect_command(hint, "my suite.toml")
    assert f"git bisect start --no-checkout {commits[8][:12]} {commits[4][:12]}" in command
    assert "exit 125" in command
    assert not bisect_hints(records_of(cells, folder), METRICS["to_first_token_cold_s"], commits[0], commits[8], folder)
    for good, bad, message in (
        ("HEAD", "HEAD~3", "not an ancestor"),
        ("HEAD", "HEAD", "not an ancestor"),
        ("nope", "HEAD", "no such commit"),
        (commits[8], commits[11], "no cell has tpot_p50_s of two commits"),  # not "did not get worse"
    ):
        with pytest.raises(UserError, match=message):
            bisect_hints(records_of(cells, folder), METRICS["tpot_p50_s"], good, bad, folder)
    with pytest.raises(UserError, match="nothing was measured"):
        bisect_hints([], METRICS["tpot_p50_s"], "HEAD~1", "HEAD", folder)


def test_lines_merge_in_git(repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, commits = repository

    def records(index: int) -> list[Record]:
        def made(result: CellResult) -> None:
            result.provenance.git_commit = commits[index]

        return records_of([factory.result(started=index, change=made)], folder)

    store = open_store(folder / "history")
    store.add(records(0))
    git(folder, "add", "history")
    git(folder, "commit", "-q", "-m", "history 0")
    for branch, index in (("one", 1), ("two", 2)):
        git(folder, "checkout", "-q", "-b", branch, "main")
        store.add(records(index))
        git(folder, "add", "history")
        git(folder, "commit", "-q", "-m", branch)
    git(folder, "merge", "-q", "one", "-m", "merge")
    assert [record.commit for record in store.read()] == commits[:3]


def test_only_ok_cells_and_unknown_commits(tmp_path: Path) -> None:
    def failed(result: CellResult) -> None:
        result.status = "failed"

    def nowhere(result: CellResult) -> None:
        result.provenance.git_commit = None

    assert records_of([factory.result(change=failed)], tmp_path) == []
    record = records_of([factory.result(change=nowhere)], tmp_path)[0]
    assert (record.commit, record.committed_at) == ("unknown", None)
    assert record.machine == "NVIDIA H200"


def test_bad_stores(tmp_path: Path) -> None:
    for name in ("none", "none.db"):
        with pytest.raises(UserError, match="no such history"):
            open_store(tmp_path / name).read()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        open_store(tmp_path / "file")
    (tmp_path / "bad.db").write_text("not a database, but long enough to be one" * 50)
    with pytest.raises(UserError, match="SQLite: file is not a database"):
        open_store(tmp_path / "bad.db").read()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "x.jsonl").write_text('\n{"a": 1}\n')
    with pytest.raises(UserError, match=r"x\.jsonl, line 2: not a history record"):
        open_store(tmp_path / "store").read()
    for text, message in (
        (b'{"a": 1, oops}', "line 1, column 10: broken JSON"),
        (b'{"a\xff"}', "line 1, byte 4: broken"),
    ):
        (tmp_path / "store" / "x.jsonl").write_bytes(text)
        with pytest.raises(UserError, match=message):
            open_store(tmp_path / "store").read()
    newer = records_of([factory.result()], tmp_path)[0]
    import msgspec

    text = msgspec.json.encode(msgspec.structs.replace(newer, record_version="2.0"))
    (tmp_path / "store" / "x.jsonl").write_bytes(text)
    with pytest.raises(UserError, match=r"record version 2\.0"):
        open_store(tmp_path / "store").read()
    with pytest.raises(UserError, match="did you mean `tpot_p50_s`"):
        run("plot", "--store", str(tmp_path), "--metric", "tpot_p5_s")
