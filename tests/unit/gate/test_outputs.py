"""What a verdict becomes for people and CI systems."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest

from benchctl.gate.judge import conclude, judge
from benchctl.gate.outputs import FILES, tell_github, write_outputs
from benchctl.gate.settings import GateSettings
from benchctl.gate.show import render_verdict
from reports.ci_github import MAX_ANNOTATIONS, render_annotations
from reports.ci_gitlab import render_code_quality, render_metrics
from reports.ci_markdown import render_verdict_markdown
from reports.junit import render_junit
from reports.markdown import MAX_CHARACTERS
from reports.verdict import GateVerdict, SideInfo, verdict_json
from server.errors import UserError
from tests.unit.gate import factory
from tests.unit.gate.test_judge import fail_some


def verdict(effect: float = 1.0, *, pairs: int = 8, change: factory.Change | None = None) -> GateVerdict:
    runs = factory.pairs(pairs, effect, change=change)
    settings = GateSettings(max_pairs=8)
    return conclude(
        judge(runs, settings), settings, baseline=SideInfo(label="origin/main"), candidate=SideInfo(label="."),
        pairs=runs, max_pairs=8,
    )  # fmt: skip


def case(xml: str, name: str) -> ElementTree.Element:
    return next(element for element in ElementTree.fromstring(xml).iter("testcase") if element.get("name") == name)


def test_junit_has_a_case_per_cell_and_metric() -> None:
    regression = render_junit(verdict(1.2))
    root = ElementTree.fromstring(regression)
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("8", "8", "0")
    failure = case(regression, "TPOT p50").find("failure")
    assert failure is not None
    assert "is beyond its minimum effect of +5.0%" in str(failure.get("message"))
    passed = ElementTree.fromstring(render_junit(verdict()))
    assert (passed.get("tests"), passed.get("failures"), passed.get("errors")) == ("8", "0", "0")


def test_junit_of_invalid_runs_is_never_green() -> None:
    root = ElementTree.fromstring(render_junit(verdict(change=fail_some)))
    assert int(root.get("errors") or 0) == 8
    empty = verdict(change=fail_some)
    empty.metrics = []
    assert ElementTree.fromstring(render_junit(empty)).get("errors") == "1"


def test_xml_survives_any_text() -> None:
    odd = verdict(change=fail_some)
    odd.reasons = ["\x00\x1b[31m <b> & \ud800 \ufffe"]
    odd.metrics[0].cell_id = 'a"<&>\x07'
    assert "\ufffd" in ElementTree.tostring(ElementTree.fromstring(render_junit(odd)), encoding="unicode")


def test_annotations() -> None:
    lines = render_annotations(verdict(1.2))
    assert len(lines) == 7
    assert all(line.startswith("::error title=benchctl/llama-3.1-8b/eager/TORCH_SDPA") for line in lines)
    assert render_annotations(verdict()) == [
        "::notice title=benchctl gate::no regression in 7 gated metrics after 8 pairs"
    ]
    unsure = render_annotations(verdict(change=fail_some))
    assert unsure[0].startswith("::error title=benchctl gate is inconclusive::")
    assert any(line.startswith("::warning") for line in unsure)
    many = verdict(change=fail_some)
    many.reasons = [f"100%\nline, {number}" for number in range(50)]
    assert len(render_annotations(many)) == 1 + MAX_ANNOTATIONS
    assert render_annotations(many)[1].endswith("::100%25%0Aline, 0")


def test_markdown_shows_the_slow_ones_first_and_fits() -> None:
    text = render_verdict_markdown(verdict(1.2))
    assert text.startswith("## benchctl gate: ❌ regression")
    assert text.count("❌ slower") == 7
    assert "probability at most 0.05" in text
    big = verdict(1.2)
    big.metrics *= 400
    text = render_verdict_markdown(big)
    assert len(text) < MAX_CHARACTERS
    assert "more rows did not fit" in text


def test_gitlab_reports() -> None:
    entries = json.loads(render_code_quality(verdict(1.2)))
    assert {entry["severity"] for entry in entries} == {"critical"}
    assert len({entry["fingerprint"] for entry in entries}) == len(entries) == 7
    assert all(entry["location"]["lines"]["begin"] == 1 for entry in entries)
    assert json.loads(render_code_quality(verdict())) == []
    assert json.loads(render_code_quality(verdict(change=fail_some)))
    metrics = render_metrics(verdict())
    assert metrics.endswith("# EOF\n")
    assert 'benchctl_tpot_p50_s{cell="benchctl/llama-3.1-8b/eager/TORCH_SDPA/sharegpt-like/rate-2"} 0.00' in metrics


def test_files_and_the_job_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = verdict(1.2)
    paths = write_outputs(document, tmp_path / "out")
    assert [path.name for path in paths] == list(FILES)
    assert msgspec.json.decode(paths[0].read_bytes(), type=GateVerdict) == document
    assert json.loads(verdict_json(document))["verdict"] == "regression"
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert tell_github(document)
    assert summary.read_text().startswith("before\n## benchctl gate: ❌ regression")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "such"))
    with pytest.raises(UserError, match="GITHUB_STEP_SUMMARY"):
        tell_github(document)


def test_the_terminal_view_has_every_verdict() -> None:
    from rich.console import Console

    for document, word in (
        (verdict(1.2), "regression"),
        (verdict(), "pass"),
        (verdict(change=fail_some), "inconclusive"),
    ):
        console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(render_verdict(document))
        assert word in console.export_text().splitlines()[-1]
        console.file.close()
