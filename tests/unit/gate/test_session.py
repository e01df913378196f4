"""Sessions over commands and git revisions that stand in for real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchctl.cli import build_app
from benchctl.gate.gate import GateRequest, SideRequest, are_results, gate_results, gate_sources, load_settings
from benchctl.gate.revisions import interpreter, repository_root, requirements, resolve_revision, worktree
from benchctl.gate.settings import DEFAULT_MIN_EFFECT, GateSettings
from benchctl.gate.sources import CheckoutSource, CommandSource
from benchctl.gate.suite_file import without_gate, write_portable_suite
from benchctl.matrix.suite import load_suite
from server.errors import UserError
from tests.unit.gate import factory
from tests.unit.gate.test_judge import saturate

ROOT = Path(__file__).parents[3]
ONE = {"output_tokens_per_s": 0.03, "tpot_p50_s": 0.05}
SUITE = """
models = ["tiny"]
backends = ["TORCH_SDPA"]
modes = ["eager"]
[gate]
max_pairs = 6
[gate.min_effect]  # only these
tpot_p50_s = 0.05
[[loads]]
workload = { name = "synthetic", num_requests = 4, input_len = 8, output_len = 2 }
arrivals = [{ name = "burst" }]
"""


def request(folder: Path, base: SideRequest, new: SideRequest, said: list[str], **changes: object) -> GateRequest:
    settings = GateSettings(max_pairs=8, min_effect=ONE, **changes)  # type: ignore[arg-type]
    return GateRequest(base, new, settings, folder / "out", seed=1, say=said.append)


def command(folder: Path, slowness: float) -> SideRequest:
    script, template = factory.write_fake_run(folder / "fake")
    return SideRequest(command=f"{sys.executable} -S {script} {template} {{output}} {slowness}")


def test_commands_are_run_in_abba_order_and_a_plain_pass_ends_early(tmp_path: Path) -> None:
    said: list[str] = []
    verdict = gate_sources(request(tmp_path, command(tmp_path, 1.0), command(tmp_path, 1.0), said))
    assert (verdict.verdict, verdict.exit_code, verdict.pairs, verdict.ended_early) == ("pass", 0, 4, True)
    assert verdict.order[0] == verdict.order[1][::-1]
    ran = [line.split(": ")[1].split()[0][0] for line in said if line.startswith("pair")]
    assert ["".join(ran[i : i + 2]) for i in range(0, 8, 2)] == verdict.order
    assert sorted(path.name for path in (tmp_path / "out" / "baseline").iterdir()) == ["00", "01", "02", "03"]
    again = gate_results(
        GateRequest(
            SideRequest(path=tmp_path / "out" / "baseline"),
            SideRequest(path=tmp_path / "out" / "candidate"),
            GateSettings(min_effect=ONE),
            tmp_path,
        )
    )
    assert again.verdict == "pass"
    with pytest.raises(UserError, match="holds the runs of an earlier gate"):
        gate_sources(request(tmp_path, command(tmp_path, 1.0), command(tmp_path, 1.0), said))


def test_a_plain_regression_is_found(tmp_path: Path) -> None:
    verdict = gate_sources(request(tmp_path, command(tmp_path, 1.0), command(tmp_path, 1.15), []))
    assert (verdict.verdict, verdict.exit_code) == ("regression", 1)
    assert verdict.pairs <= 8
    assert all(one.outcome == "regression" for one in verdict.metrics)


def test_runs_that_break(tmp_path: Path) -> None:
    broken = SideRequest(command=f"{sys.executable} -c 'import sys; sys.exit(\"no model {{output}}\")'")
    candidate = gate_sources(request(tmp_path / "1", command(tmp_path, 1.0), broken, []))
    assert (candidate.verdict, candidate.exit_code) == ("failed", 1)
    assert "the candidate's run left no results" in candidate.reasons[0] or "status 1" in candidate.reasons[0]
    baseline = gate_sources(request(tmp_path / "2", broken, command(tmp_path, 1.0), []))
    assert (baseline.verdict, baseline.exit_code) == ("inconclusive", 3)
    with pytest.raises(UserError, match="cannot run /no/such"):
        gate_sources(request(tmp_path / "3", SideRequest(command="/no/such {output}"), command(tmp_path, 1.0), []))


def test_a_disturbed_pair_is_run_again_and_said(tmp_path: Path) -> None:
    script, good = factory.write_fake_run(tmp_path / "good")
    bad = factory.write_fake_run(tmp_path / "bad", change=saturate)[1]
    shell = (
        f"if mkdir {tmp_path}/first 2>/dev/null; then t={bad}; else t={good}; fi; {sys.executable} -S {script} $t $0 1"
    )
    once = SideRequest(command=f"sh -c '{shell}' {{output}}")
    said: list[str] = []
    verdict = gate_sources(request(tmp_path, once, command(tmp_path, 1.0), said))
    assert verdict.verdict == "pass"
    assert any("pair 1 was run again: " in text and "client saturated" in text for text in verdict.warnings)
    (tmp_path / "first").rmdir()
    strict = gate_sources(request(tmp_path / "strict", once, command(tmp_path, 1.0), [], max_disturbed=0))
    assert (strict.verdict, strict.pairs) == ("inconclusive", 2)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose `benchctl matrix` writes made-up results, 15% slower in the second commit."""
    folder = tmp_path / "repo"
    (folder / "benchctl").mkdir(parents=True)
    (folder / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    main = folder / "benchctl" / "__main__.py"
    (folder / "benchctl" / "__init__.py").touch()
    git(folder, "init", "-q", "-b", "main")
    script, template = factory.write_fake_run(tmp_path / "fake")
    for slowness in (1.0, 1.15):
        main.write_text(
            textwrap.dedent(
                f"""
                import os, subprocess, sys, tomllib
                assert sys.argv[1] == "matrix"
                flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
                assert "gate" not in tomllib.loads(open(flags["--suite"]).read())
                here = os.path.dirname(__file__)
                head = ["git", "-C", here, "rev-parse", "HEAD"]
                commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
                arguments = [{str(template)!r}, flags["--output"], "{slowness}", commit]
                sys.exit(subprocess.run([sys.executable, "-S", {str(script)!r}, *arguments]).returncode)
                """
            )
        )
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"slowness {slowness}")
    (tmp_path / "suite.toml").write_text(SUITE)
    monkeypatch.chdir(folder)
    return folder


def gate_revisions(folder: Path, base: SideRequest, new: SideRequest, **changes: object) -> GateRequest:
    settings = load_settings(str(folder / "suite.toml"), [], None)
    return GateRequest(
        base, new, settings, folder / "out", suite=str(folder / "suite.toml"), seed=1, say=lambda _: None, **changes  # type: ignore[arg-type]
    )  # fmt: skip


def test_revisions_run_from_worktrees_that_go_afterwards(repository: Path, tmp_path: Path) -> None:
    verdict = gate_sources(gate_revisions(tmp_path, SideRequest(revision="HEAD~1"), SideRequest()))
    assert verdict.verdict == "regression"
    assert verdict.baseline.git_commit == git(repository, "rev-parse", "HEAD~1")
    assert verdict.candidate.git_commit == git(repository, "rev-parse", "HEAD")
    assert git(repository, "worktree", "list").count("\n") == 0
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"benchctl-gate-*/{verdict.baseline.git_commit[:12]}"))


def test_the_same_revision_passes(repository: Path, tmp_path: Path) -> None:
    verdict = gate_sources(gate_revisions(tmp_path, SideRequest(revision="main"), SideRequest(revision="HEAD")))
    assert (verdict.verdict, verdict.pairs) == ("pass", 4)


def test_two_checkouts(repository: Path, tmp_path: Path) -> None:
    with worktree(repository, git(repository, "rev-parse", "HEAD~1")) as old:
        verdict = gate_sources(gate_revisions(tmp_path, SideRequest(path=repository), SideRequest(path=old)))
    assert verdict.verdict == "pass"
    assert {one.outcome for one in verdict.metrics} == {"improved"}


def test_results_of_another_copy_are_refused(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = gate_revisions(tmp_path, SideRequest(revision="HEAD~1"), SideRequest())
    real = CheckoutSource._environment

    def elsewhere(self: CheckoutSource) -> dict[str, str]:
        environment = real(self)
        environment["PYTHONPATH"] = str(repository)
        return environment

    monkeypatch.setattr(CheckoutSource, "_environment", elsewhere)
    with pytest.raises(UserError, match="another copy of benchctl was imported"):
        gate_sources(asked)


def test_revisions_that_cannot_be(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--base-rev 'no-such': no such commit"):
        resolve_revision(repository, "no-such", "--base-rev")
    with pytest.raises(UserError, match="no such commit"):
        resolve_revision(repository, "--help", "--base-rev")
    with pytest.raises(UserError, match="not inside a git checkout"):
        repository_root(tmp_path)
    git(repository, "rm", "-q", "-r", "benchctl")
    git(repository, "commit", "-q", "-m", "gone")
    with pytest.raises(UserError, match="no benchctl source tree"):
        gate_sources(gate_revisions(tmp_path, SideRequest(revision="HEAD"), SideRequest(revision="HEAD~1")))
    assert git(repository, "worktree", "list").count("\n") == 0


def test_an_environment_of_its_own_only_for_other_dependencies(tmp_path: Path) -> None:
    for name, dependencies in (("a", '["numpy>=1.26"]'), ("b", '["numpy>=1.26"]'), ("c", '["numpy>=1.25"]')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(
            f"[project]\nversion = '{name}'\ndependencies = {dependencies}\n"
        )
    with interpreter(tmp_path / "a", tmp_path / "b") as python:
        assert python == sys.executable
    # numpy is there already through the fallback, so that nothing is downloaded.
    with interpreter(tmp_path / "c", tmp_path / "a") as python:
        assert python != sys.executable
        done = subprocess.run(
            [python, "-c", "import numpy, sys; print(sys.prefix)"], capture_output=True, text=True, check=True
        )
        assert "benchctl-gate-venv-" in done.stdout
    assert not Path(python).exists()
    (tmp_path / "c" / "pyproject.toml").write_text("[project\n")
    with pytest.raises(UserError, match=r"pyproject\.toml"):
        requirements(tmp_path / "c")


def test_an_interrupt_stops_the_run_in_progress(tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text(
        "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(60)"
    )
    sleeper = f"{sys.executable} {tmp_path}/sleep.py {tmp_path}/pid {{output}}"
    argv = [
        sys.executable,
        "-m",
        "benchctl",
        "gate",
        "--base-command",
        sleeper,
        "--candidate-command",
        sleeper,
        "-o",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for _ in range(400):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_portable_suites(tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text(SUITE)
    settings = load_suite(str(tmp_path / "suite.toml")).gate
    assert (settings.max_pairs, settings.min_effect) == (6, {"tpot_p50_s": 0.05})
    written = write_portable_suite(str(tmp_path / "suite.toml"), tmp_path / "..")
    assert load_suite(str(written)).gate == GateSettings()
    assert load_suite(str(written)).loads == load_suite(str(tmp_path / "suite.toml")).loads
    written.unlink()
    (tmp_path / "inline.toml").write_text('gate = { max_pairs = 6 }\nmodels = ["tiny"]\nloads = []\n')
    with pytest.raises(UserError, match="table of their own"):
        write_portable_suite(str(tmp_path / "inline.toml"), tmp_path)
    assert without_gate(["gate.max_pairs=4", "server.max_num_seqs=8"]) == ["server.max_num_seqs=8"]


@pytest.mark.parametrize(("text", "message"), [("true", "no {output}"), ("'{output}", "No closing quotation")])
def test_commands_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CommandSource(text, "--base-command")


def test_sides_that_do_not_go_together(tmp_path: Path) -> None:
    results = factory.write_runs(tmp_path / "a", [1.0])
    none, given = SideRequest(), SideRequest(path=results)
    checkout, rev, run = SideRequest(path=ROOT), SideRequest(revision="x"), SideRequest(command="x {output}")
    assert are_results(given, given, calibrate=False)
    assert not are_results(checkout, checkout, calibrate=False)
    assert not are_results(rev, none, calibrate=False)
    assert not are_results(none, none, calibrate=True)
    for base, new, calibrate, message in (
        (none, none, False, "name a baseline"),
        (given, none, False, "name a candidate"),
        (given, checkout, False, "results on one side only"),
        (run, none, False, "--base-command needs a candidate"),
        (SideRequest(path=results, revision="x"), none, False, "given twice"),
        (SideRequest(path=tmp_path / "none"), given, False, "no such"),
        (checkout, checkout, True, "one side against itself"),
    ):
        with pytest.raises(UserError, match=message):
            are_results(base, new, calibrate=calibrate)


def test_the_command_writes_everything(tmp_path: Path) -> None:
    a = factory.write_runs(tmp_path / "a", [1.0, 1.003, 0.998, 1.001, 1.002, 0.999, 1.0, 1.001])
    b = factory.write_runs(tmp_path / "b", [1.15, 1.153, 1.15, 1.149, 1.152, 1.15, 1.151, 1.15], started=1)
    runner, app = CliRunner(), build_app(["gate"])
    environment = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "COLUMNS": "180"}
    arguments = ["gate", str(a), str(b), "-o", str(tmp_path / "out"), "--github"]
    done = runner.invoke(app, arguments, env=environment)
    assert done.exit_code == 1, done.output
    assert "regression: regression in 7 of 7 gated metrics after 8 pairs" in done.output
    assert done.output.count("::error ") == 7
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_bytes())
    assert verdict["exit_code"] == 1
    # Given results are judged by the default effects, p99s too; the suite `gate` has a table for its own cells.
    assert load_settings(None, [], None, runs_suite=False).effects == DEFAULT_MIN_EFFECT
    assert load_settings(None, [], None).effects.keys() < DEFAULT_MIN_EFFECT.keys()
    assert load_settings(None, ["gate.min_effect.ttft_p99_s=0.2"], None, runs_suite=False).effects["ttft_p99_s"] == 0.2
    assert "❌" in (tmp_path / "summary.md").read_text()
    for wrong, message in (
        (["gate"], "name a baseline"),
        ([*arguments, "--set", "gate.alpha=2"], "gate.alpha must be"),
    ):
        with pytest.raises(UserError, match=message):
            runner.invoke(app, wrong, catch_exceptions=False)


def test_calibration_from_given_runs(tmp_path: Path) -> None:
    noise = np.exp(np.random.default_rng(3).normal(0, 0.01, (2, 10)))
    a = factory.write_runs(tmp_path / "a", [float(x) for x in noise[0]])
    b = factory.write_runs(tmp_path / "b", [float(x) for x in noise[1]], started=1)
    arguments = ["gate", str(a), str(b), "--calibrate", "--max-pairs", "8", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(build_app(["gate"]), arguments, env={"COLUMNS": "180"})
    assert done.exit_code == 0, done.output
    assert "[gate.min_effect]" in done.output
    calibration = json.loads((tmp_path / "out" / "calibration.json").read_bytes())
    assert calibration["false_alarm_rate"] <= 0.05
    assert calibration["pass_rate"] > 0.5
    for one in calibration["metrics"]:
        assert one["min_effect"] < one["detectable"]["8"] < one["min_effect"] + 0.06
        # Noise of 1.4% a pair: about twice as much must be asked for.
        assert 0.01 < one["suggested"] < 0.06


def test_one_path_beside_a_base_revision_is_the_candidate(repository: Path, tmp_path: Path) -> None:
    arguments = ["gate", str(repository), "--base-rev", "HEAD", "-s", str(tmp_path / "suite.toml"), "-o", "../out"]
    done = CliRunner().invoke(build_app(["gate"]), arguments)
    assert done.exit_code == 0, done.output
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_bytes())
    assert (verdict["baseline"]["label"], verdict["candidate"]["label"]) == ("HEAD", str(repository))


def test_calibration_runs_one_side_against_itself(tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text(SUITE)
    fake = str(command(tmp_path, 1.0).command)
    arguments = ["gate", "--calibrate", "--base-command", fake, "-s", str(tmp_path / "suite.toml")]
    done = CliRunner().invoke(build_app(["gate"]), [*arguments, "-o", str(tmp_path / "out")], env={"COLUMNS": "180"})
    assert done.exit_code == 0, done.output
    calibration = json.loads((tmp_path / "out" / "calibration.json").read_bytes())
    assert calibration["pairs"] == calibration["max_pairs"] == 6
    assert [one["metric"] for one in calibration["metrics"]] == ["tpot_p50_s"]
    few = CliRunner().invoke(build_app(["gate"]), [*arguments, "-o", str(tmp_path / "few"), "--max-pairs", "2"])
    assert "2 pairs are too few" in str(few.exception)
