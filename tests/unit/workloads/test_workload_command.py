from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from benchctl.commands import workload as command
from server.errors import UserError
from tests.unit.workloads.conftest import byte_level_bpe
from workloads import build_workload, list_workloads
from workloads.parameters import parse_assignments
from workloads.summary import rate_curve, sparkline, summarise


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return CliRunner().invoke(app, ["workload", *arguments], env={"COLUMNS": "200"})


def test_ls_names_every_workload() -> None:
    assert json.loads(run("ls", "--json").stdout) == list_workloads()
    text = run("ls").stdout
    assert all(name in text for name in list_workloads())


def test_show_prints_what_was_built(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    byte_level_bpe().save(str(file))
    result = run(
        "show", "sharegpt-like", "--num-requests", "30", "--seed", "5", "--tokenizer", str(file),
        "--set", "max_prompt_len=200", "--arrival", "poisson:rate=3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for expected in (
        "digest",
        "30 requests",
        "prompt tokens",
        "output tokens",
        "rate",
        "dropped",
        "#0",
        "#14",
        "#29",
    ):
        assert expected in result.stdout


def test_show_json_agrees_with_the_workload() -> None:
    spec = {"name": "synthetic", "num_requests": 40, "input_len": {"distribution": "uniform", "low": 10, "high": 20}}
    workload = build_workload(spec, seed=2, tokenizer=None)
    result = run(
        "show", "synthetic", "--seed", "2", "--num-requests", "40", "--json", "--arrival", "constant:rate=2",
        "--set", "input_len.distribution=uniform", "--set", "input_len.low=10", "--set", "input_len.high=20",
    )  # fmt: skip
    shown = json.loads(result.stdout)
    assert shown["digest"] == workload.digest
    assert shown["parameters"] == workload.parameters
    assert shown["prompt_tokens"]["count"] == 40
    assert 10 <= shown["prompt_tokens"]["min"] <= shown["prompt_tokens"]["p50"] <= shown["prompt_tokens"]["max"] <= 20
    assert shown["max_tokens"]["total"] == 40 * 128
    assert [sample["index"] for sample in shown["samples"]] == [0, 19, 39]
    assert shown["rate_curve"]["mean"] == pytest.approx(40 / 19.5)
    assert shown["schedule_digest"]


@pytest.mark.parametrize(
    ("arrival", "expected"), [("burst", "all at once"), ("concurrency:concurrency=3", "closed loop of 3")]
)
def test_show_without_a_curve_says_why(arrival: str, expected: str) -> None:
    assert expected in run("show", "synthetic", "--arrival", arrival).stdout
    assert "set by the arrival process" in run("show", "synthetic").stdout


def test_a_workload_is_named_as_for_run() -> None:
    shown = [
        run("show", "synthetic:output_len=3,num_requests=4", "--json").stdout,
        run("show", '{"name": "synthetic", "output_len": 3}', "--num-requests", "4", "--json").stdout,
        run("show", "synthetic", "--set", "output_len=3", "--set", "num_requests=4", "--json").stdout,
    ]
    assert len(set(shown)) == 1


def test_export_and_show_agree_on_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    assert run("export", "synthetic", "-o", str(file), "-n", "12").exit_code == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.jsonl"]
    digest = json.loads(run("show", "synthetic", "--num-requests", "12", "--json").stdout)["digest"]
    assert json.loads(run("show", "trace", "--set", f"path={file}", "--json").stdout)["digest"] == digest
    standard = run("export", "synthetic", "--num-requests", "12").stdout_bytes
    assert standard == file.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "synthetik"], "did you mean `synthetic`"),
        (["show", "synthetic", "--set", "inputlen=3"], "did you mean `input_len`"),
        (["show", "synthetic", "--set", "input_len"], "expected key=value"),
        (["show", "synthetic", "--arrival", "poisson:rate=0"], "rate must be a number above 0"),
        (["show", "synthetic", "--arrival", "trace"], "no timestamps"),
        (["show", "synthetic", "--num-requests", "-1"], "num_requests -1"),
        (["show", "synthetic", "--tokenizer", "tiny"], "has no tokenizer"),
        (["export", "synthetic", "-o", "/nowhere/at/all"], "cannot write /nowhere/at/all: No such file"),
        (["export", "synthetic", "-o", "/"], "cannot write /: Is a directory"),
    ],
)
def test_mistakes_are_user_errors(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_a_full_disk_is_a_user_error_and_leaves_the_device_alone() -> None:
    device = Path("/dev/full")
    if not device.is_char_device():
        pytest.skip("no /dev/full here")
    result = run("export", "synthetic", "-o", str(device))
    assert isinstance(result.exception, UserError)
    assert "No space left" in str(result.exception)
    assert device.is_char_device()


def test_a_broken_tokenizer_file_is_a_user_error(tmp_path: Path) -> None:
    for content in ("{", "{}", "\x00"):
        (tmp_path / "tokenizer.json").write_text(content)
        result = run("show", "synthetic", "--tokenizer", str(tmp_path))
        assert isinstance(result.exception, UserError)
        assert "not a usable tokenizer.json" in str(result.exception)


def test_assignments_nest_and_keep_types() -> None:
    assert parse_assignments(["a=1", "b.c=true", "b.d=x y", 'e={"f": [1]}', "g=", "a=2.5"]) == {
        "a": 2.5,
        "b": {"c": True, "d": "x y"},
        "e": {"f": [1]},
        "g": "",
    }
    for bad in (["=1"], ["a..b=1"], ["a=1", "a.b=2"]):
        with pytest.raises(UserError, match="--set"):
            parse_assignments(bad)


def test_curve_and_sparkline() -> None:
    import numpy as np

    curve = rate_curve(np.arange(100) / 10, buckets=10)
    assert curve is not None
    assert sum(curve.rates) * curve.bucket_s == pytest.approx(100)
    assert curve.mean == pytest.approx(100 / 9.9)
    assert rate_curve(np.zeros(5)) is None
    assert sparkline([0, 1, 8]) == " ▂█"
    assert sparkline([]) == ""


def test_a_summary_takes_fewer_requests_than_samples() -> None:
    workload = build_workload({"name": "synthetic", "num_requests": 1}, seed=0, tokenizer=None)
    assert [sample.index for sample in summarise(workload, None).samples] == [0]


def test_lines_stay_whole_in_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "' + "word " * 30 + '"}\n')
    shown = run("show", f"custom:path={tmp_path / 'rows.jsonl'}").output
    assert f"  {'word ' * 30!r}" in shown.splitlines()
