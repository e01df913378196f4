"""`benchctl compare`: values, intervals, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchctl.cli import build_app
from benchctl.compare.compare import compare
from benchctl.gate.comparable import FIELDS, IncomparableError
from reports.results import write_result
from reports.schema import CellResult
from server.errors import UserError
from tests.unit.gate import factory


def one(folder: Path, name: str, slowness: float = 1.0, change: factory.Change | None = None) -> Path:
    return write_result(factory.result(slowness, change=change), folder / f"{name}.json")


def other_model(result: CellResult) -> None:
    result.config.model = "tiny"


def other_gpu(result: CellResult) -> None:
    result.provenance.gpus = [{"name": "NVIDIA A10"}]


def free_lengths(result: CellResult) -> None:
    assert result.workload is not None
    result.workload.forced_lengths = False


def other_slo(result: CellResult) -> None:
    result.config.slos = ["ttft:9s"]


def with_warmup(result: CellResult) -> None:
    result.config.client = {"workers": 2, "warmup": "20"}


def other_digest(result: CellResult) -> None:
    assert result.workload is not None
    result.workload.digest = "0" * 64


def test_single_files_show_changes_without_an_interval(tmp_path: Path) -> None:
    table = compare([one(tmp_path, "a"), one(tmp_path, "b", 1.1), one(tmp_path, "c", 0.9)])
    row = next(row for row in table.cells[0].rows if row.metric == "tpot_p50_s")
    assert [other.change for other in row.others] == pytest.approx([0.1, -0.1])
    assert row.others[0].low is None
    assert table.runs == [1, 1, 1]


def test_repeated_runs_give_an_interval(tmp_path: Path) -> None:
    a = factory.write_runs(tmp_path / "a", [1.0, 1.01, 0.99, 1.0, 1.005, 0.995])
    b = factory.write_runs(tmp_path / "b", [1.1, 1.11, 1.09, 1.12, 1.1, 1.08])
    table = compare([a, b])
    change = next(row for row in table.cells[0].rows if row.metric == "ttft_p50_s").others[0]
    assert change.low is not None
    assert change.high is not None
    assert change.change is not None
    assert 0.05 < change.low < change.change < change.high < 0.2
    assert change.confidence == pytest.approx(0.95)
    assert table.runs == [6, 6]


@pytest.mark.parametrize(
    ("change", "field", "shown"),
    [
        (other_model, "model", "llama-3.1-8b against tiny"),
        (other_gpu, "gpu", "NVIDIA H200.* against .*A10"),
        (free_lengths, "forced_lengths", "True against False"),
        (other_digest, "workload", "abab.* against 0000"),
        (with_warmup, "warmup", "0s against 20"),
        (other_slo, "slo", "ttft:.* against ttft:9s"),
    ],
)
def test_what_is_not_comparable_is_refused_by_name(
    tmp_path: Path, change: factory.Change, field: str, shown: str
) -> None:
    a, b = one(tmp_path, "a"), one(tmp_path, "b", change=change)
    with pytest.raises(IncomparableError, match=rf"different {field} \(.*{shown}.*--ignore-field {field}$") as caught:
        compare([a, b])
    assert caught.value.exit_code == 3
    assert compare([a, b], {field}).cells
    assert field in FIELDS


def test_cells_without_a_partner_are_named(tmp_path: Path) -> None:
    for side, rates in (("a", (2.0, 8.0)), ("b", (8.0, 16.0))):
        (tmp_path / side).mkdir()
        for rate in rates:
            write_result(factory.samples.cell("eager", "TORCH_SDPA", rate), tmp_path / side)
    table = compare([tmp_path / "a", tmp_path / "b"])
    assert [cell.cell_id.rpartition("/")[2] for cell in table.cells] == ["rate-8"]
    assert {label[-1]: [name.rpartition("/")[2] for name in names] for label, names in table.only_in.items()} == {
        "a": ["rate-2"],
        "b": ["rate-16"],
    }


def test_nothing_in_common(tmp_path: Path) -> None:
    for side, rates in (("a", (2.0, 4.0)), ("b", (8.0, 16.0))):
        (tmp_path / side).mkdir()
        for rate in rates:
            write_result(factory.samples.cell("eager", "TORCH_SDPA", rate), tmp_path / side)
    with pytest.raises(IncomparableError, match="no cell in common"):
        compare([tmp_path / "a", tmp_path / "b"])


def test_the_command(tmp_path: Path) -> None:
    a, b = one(tmp_path, "a"), one(tmp_path, "b", 1.1)
    app = build_app(["compare"])
    runner = CliRunner()
    shown = runner.invoke(app, ["compare", str(a), str(b)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "+10%" in shown.output
    assert "no interval" in shown.output
    as_json = runner.invoke(app, ["compare", str(a), str(b), "--format", "json"])
    assert json.loads(as_json.output)["runs"] == [1, 1]
    markdown = runner.invoke(app, ["compare", str(a), str(b), "-f", "md"]).output
    assert "| TPOT p50 |" in markdown
    for arguments, message in (
        ([str(a)], "at least two"),
        ([str(a), str(b), "-f", "xml"], "--format 'xml'"),
        ([str(a), str(b), "--ignore-field", "gpus"], "did you mean `gpu`"),
        ([str(a), str(tmp_path / "none")], "no such"),
    ):
        result = runner.invoke(app, ["compare", *arguments])
        assert isinstance(result.exception, UserError)
        assert message in str(result.exception)
