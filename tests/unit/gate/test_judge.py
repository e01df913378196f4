"""Verdicts over made-up runs: validity first, then the statistics."""

from __future__ import annotations

import pytest

from benchctl.gate.comparable import IncomparableError
from benchctl.gate.judge import Judgement, conclude, judge
from benchctl.gate.settings import GateSettings, check_settings, log_effect, relative_change
from reports.metrics import METRICS
from reports.schema import CellResult
from reports.verdict import SideInfo
from server.errors import UserError
from tests.unit.gate import factory
from tests.unit.gate.factory import load

SETTINGS = GateSettings(max_pairs=8)


def outcomes(judgement: Judgement) -> dict[str, str]:
    return {one.metric: one.outcome for one in judgement.metrics}


def test_like_runs_pass() -> None:
    judgement = judge(factory.pairs(8), SETTINGS)
    assert judgement.verdict == "pass"
    assert set(outcomes(judgement).values()) <= {"ok", "improved"}
    assert set(outcomes(judgement)) == {
        "output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "to_healthy_cold_s",
        "to_healthy_warm_s",
    }  # fmt: skip


def test_fifteen_percent_slower_is_a_regression_with_its_interval() -> None:
    judgement = judge(factory.pairs(8, 1.15), SETTINGS)
    assert judgement.verdict == "regression"
    by_metric = {one.metric: one for one in judgement.metrics}
    tpot = by_metric["tpot_p50_s"]
    assert tpot.outcome == "regression"
    assert tpot.change == pytest.approx(0.15, abs=0.02)
    assert tpot.change_low is not None
    assert 0.05 < tpot.change_low < 0.15
    throughput = by_metric["output_tokens_per_s"]
    assert throughput.change == pytest.approx(1 / 1.15 - 1, abs=0.02)
    assert throughput.change_high is not None
    assert throughput.change_high < -0.03
    assert "TPOT p50 +1" in "\n".join(judgement.reasons)


def test_faster_is_improved_and_passes() -> None:
    judgement = judge(factory.pairs(8, 0.8), SETTINGS)
    assert judgement.verdict == "pass"
    assert set(outcomes(judgement).values()) == {"improved"}


def test_a_change_below_the_minimum_effect_is_no_regression_however_certain() -> None:
    judgement = judge(factory.pairs(12, 1.02, noise=0.0005), GateSettings())
    assert judgement.verdict == "pass"


def test_too_few_pairs_say_what_p_they_can_reach() -> None:
    judgement = judge(factory.pairs(3, 1.5), SETTINGS)
    assert judgement.verdict is None
    assert judgement.reasons[0].startswith("3 pairs can reach p = 0.125 at best; a regression in one of 7")
    assert "needs 8 pairs" in judgement.reasons[0]
    document = conclude(
        judgement, SETTINGS, baseline=SideInfo(label="a"), candidate=SideInfo(label="b"),
        pairs=factory.pairs(3, 1.5), max_pairs=3,
    )  # fmt: skip
    assert (document.verdict, document.exit_code) == ("inconclusive", 3)
    assert document.metrics[0].p_reachable == 0.125
    assert document.metrics[0].method == "sign-flip permutation"


def test_five_pairs_are_enough_for_one_gated_metric() -> None:
    settings = GateSettings(min_effect={"tpot_p50_s": 0.05})
    judgement = judge(factory.pairs(5, 1.2), settings)
    assert judgement.verdict == "regression"
    assert judgement.metrics[0].p == 2**-5


def test_noise_is_inconclusive_and_never_a_pass() -> None:
    judgement = judge(factory.pairs(8, noise=0.3, seed=5), SETTINGS)
    assert judgement.verdict is None
    assert any("shows neither a regression nor its absence" in reason for reason in judgement.reasons)


def fail_some(result: CellResult) -> None:
    load(result.metrics).failed = 3
    load(result.metrics).errors = {"timeout": 3}


def saturate(result: CellResult) -> None:
    result.status, result.reason = "invalid", "client saturated: client lag p99 7.2 ms is above 5 ms"


def fewer_tokens(result: CellResult) -> None:
    mean = load(result.metrics).output_tokens.mean
    assert mean is not None
    load(result.metrics).output_tokens.mean = mean * 0.9


def throttle(result: CellResult) -> None:
    result.telemetry = {"t": [0.0, 1.0], "gpu0.throttled": [0.0, 1.0], "gpu0.processes": [1.0, 1.0]}


def share(result: CellResult) -> None:
    result.telemetry = {"t": [0.0, 1.0], "gpu0.throttled": [0.0, 0.0], "gpu0.processes": [1.0, 2.0]}


def time_out(result: CellResult) -> None:
    result.status, result.reason = "timeout", "the cell did not end within 9 s"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (fail_some, "3 of 403 requests failed (3 timeout)"),
        (saturate, "client saturated"),
        (fewer_tokens, "different output tokens"),
        (throttle, "gpu0 was throttled"),
        (share, "gpu0 was shared: 2 processes"),
    ],
)
@pytest.mark.parametrize("effect", [1.0, 1.5])
def test_runs_that_are_not_valid_are_inconclusive_whatever_they_say(
    change: factory.Change, reason: str, effect: float
) -> None:
    pairs = factory.pairs(8, effect)
    pairs[5] = pairs[5][0], factory.run(effect, started=11, change=change)
    judgement = judge(pairs, SETTINGS)
    assert judgement.verdict == "inconclusive"
    assert any(reason in line for line in judgement.reasons), judgement.reasons
    assert all(one.outcome == "invalid" for one in judgement.metrics)


def test_a_slower_clock_under_load_is_seen() -> None:
    def clock(mhz: float) -> factory.Change:
        def change(result: CellResult) -> None:
            series = {"t": [0.0, 1.0, 2.0], "gpu0.sm_clock_mhz": [300.0, mhz, mhz]}
            result.telemetry = {**series, "gpu0.utilization_percent": [0.0, 98.0, 97.0]}

        return change

    like = [
        (factory.run(started=2 * i, change=clock(1980)), factory.run(started=2 * i + 1, change=clock(1935)))
        for i in range(6)
    ]
    assert judge(like, SETTINGS).verdict == "pass"
    slowed = [*like[:5], (factory.run(started=10, change=clock(1980)), factory.run(started=11, change=clock(1200)))]
    assert any("gpu0 was slowed in candidate 6: 1200 MHz" in reason for reason in judge(slowed, SETTINGS).reasons)


def test_a_candidate_that_always_fails_is_a_failure_and_once_is_inconclusive() -> None:
    judgement = judge(factory.pairs(4, change=time_out), SETTINGS)
    assert judgement.verdict == "failed"
    assert "did not end within 9 s" in judgement.reasons[0]
    once = [*factory.pairs(3), *factory.pairs(1, change=time_out)]
    assert judge(once, SETTINGS).verdict == "inconclusive"


def test_percentiles_without_samples() -> None:
    def few(result: CellResult) -> None:
        for name in ("ttft_s", "tpot_s"):
            getattr(result.metrics, name).n = 16

    pairs = [(factory.run(started=i, change=few), factory.run(started=i + 6, change=few)) for i in range(6)]
    judgement = judge(pairs, SETTINGS)
    assert judgement.verdict == "pass"
    assert "ttft_p99_s" not in outcomes(judgement), "a default that cannot be read is left out"
    asked = judge(pairs, GateSettings(min_effect={"ttft_p99_s": 0.1}))
    assert asked.verdict == "inconclusive"
    assert "16 samples are too few for a p99, which needs 100" in asked.reasons[0]


def test_a_metric_that_only_one_side_has_is_inconclusive() -> None:
    def no_ttft(result: CellResult) -> None:
        load(result.metrics).ttft_s.percentiles = {}

    judgement = judge(factory.pairs(6, change=no_ttft), SETTINGS)
    assert judgement.verdict == "inconclusive"
    assert any("TTFT p50: not measured in the candidate" in reason for reason in judgement.reasons)


def test_a_metric_that_is_zero_is_inconclusive() -> None:
    def no_tokens(result: CellResult) -> None:
        load(result.metrics).throughput.output_tokens_per_s = 0.0

    judgement = judge(factory.pairs(6, change=no_tokens), SETTINGS)
    assert judgement.verdict == "inconclusive"
    assert any("Output tok/s: is zero in some run" in reason for reason in judgement.reasons)


def test_different_experiments_are_refused_with_the_field() -> None:
    def other(result: CellResult) -> None:
        assert result.workload is not None
        result.workload.digest = "cd" * 32

    pairs = factory.pairs(6, change=other)
    with pytest.raises(IncomparableError, match=r"different workload \(abab.*--ignore-field workload"):
        judge(pairs, SETTINGS)
    assert judge(pairs, SETTINGS, ignore={"workload"}).verdict == "pass"


def test_a_run_that_is_there_twice_is_no_evidence() -> None:
    runs = factory.pairs(8)
    same_side_twice = judge([(base, base) for base, _ in runs], SETTINGS)
    assert same_side_twice.verdict == "inconclusive"
    assert "candidate 1 is a copy of baseline 1, not a run of its own" in same_side_twice.reasons[0]
    stale = judge([*runs[:7], (runs[7][0], runs[0][1])], SETTINGS)
    assert stale.verdict == "inconclusive"
    assert len(stale.reasons) == 1


def test_warnings() -> None:
    first, second = factory.pairs(4), factory.pairs(4)
    apart = [(a[0], factory.run(started=100 + i)) for i, (a, _) in enumerate(zip(first, second, strict=True))]
    apart[0][1].cells[next(iter(apart[0][1].cells))].provenance.hostname_hash = "other"
    apart[1][1].cells[next(iter(apart[0][1].cells))].provenance.hostname_hash = "machine"
    document = conclude(
        judge(apart, SETTINGS), SETTINGS, baseline=SideInfo(label="a"), candidate=SideInfo(label="b"), pairs=apart,
        max_pairs=4,
    )  # fmt: skip
    assert len(document.warnings) == 2
    assert "before the other's" in document.warnings[1]


def test_other_work_on_the_machine_is_told() -> None:
    def busy(cores: float) -> factory.Change:
        def change(result: CellResult) -> None:
            result.telemetry = {
                "t": [0.0, 1.0, 2.0],
                "host.cpu_cores_busy": [None, 1.5 + cores, 1.4 + cores],
                "server.cpu_cores": [None, 1.4, 1.3],
            }

        return change

    def warnings(cores: float) -> list[str]:
        pairs = [(factory.run(started=2 * i, change=busy(0.1)), factory.run(started=2 * i + 1)) for i in range(4)]
        pairs[2] = pairs[2][0], factory.run(started=5, change=busy(cores))
        sides = {"baseline": SideInfo(label="a"), "candidate": SideInfo(label="b")}
        return conclude(judge(pairs, SETTINGS), SETTINGS, **sides, pairs=pairs, max_pairs=4).warnings

    assert warnings(0.4) == []
    assert warnings(1.2)[0].startswith("the machine did other work: beside the server 0.2 to 1.3 cores were busy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0.0}, "gate.alpha must be between"),
        ({"beta": 1.0}, "gate.beta must be between"),
        ({"min_pairs": 9, "max_pairs": 8}, "1 <= min_pairs <= max_pairs"),
        ({"max_pairs": 1000}, "max_pairs <= 64"),
        ({"max_disturbed": -1}, "max_disturbed"),
        ({"min_effect": {}}, "nothing would be gated"),
        ({"min_effect": {"tpot_p5_s": 0.1}}, "metric 'tpot_p5_s' is unknown; did you mean `tpot_p50_s`"),
        ({"min_effect": {"tpot_p50_s": 5.0}}, r"must be between 0 and 1 \(0.05 is 5%\)"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_settings(GateSettings(**changes), "suite x")  # type: ignore[arg-type]


def test_effects_have_the_direction_of_their_metric() -> None:
    for key in ("output_tokens_per_s", "tpot_p50_s"):
        metric = METRICS[key]
        worse = relative_change(metric, log_effect(metric, 0.04))
        assert worse == pytest.approx(-0.04 if metric.higher_is_better else 0.04)
