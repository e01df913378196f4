"""What a run's status is, and how many requests a rate and a duration need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchctl.loadgen.options import LoadOutcome
from benchctl.loadgen.session import sized_workload
from benchctl.loadgen.verdict import ran_out, verdict
from reports.schema import Throughput
from tests.unit.reports import samples


def outcome(**changes: Any) -> LoadOutcome:
    metrics = samples.load_metrics(1, 2)
    details = changes.pop("error_details", {})
    aborted = changes.pop("aborted", None)
    for name, value in changes.items():
        setattr(metrics, name, value)
    return LoadOutcome(records=Path("r"), metrics=metrics, interrupted=False, aborted=aborted, error_details=details)


@pytest.mark.parametrize(
    ("result", "failure", "code", "interrupted", "status", "words"),
    [
        (outcome(), None, None, False, "ok", None),
        (outcome(), None, -9, True, "interrupted", "interrupted"),
        (outcome(interrupted=3, unsent=40), None, None, True, "interrupted", "(3 in flight, 40 due and still waiting"),
        (outcome(), None, -9, False, "failed", "was killed by signal 9"),
        (outcome(), None, 1, False, "failed", "exited with status 1"),
        (None, "the disk is full", None, False, "failed", "the disk is full"),
        (outcome(aborted="takes no connections"), None, None, False, "failed", "takes no connections"),
        (
            outcome(aborted="it is gone", failed=2, errors={"connect error": 2}),
            *(None, None, False, "failed", "it is gone; 2 × connect error"),
        ),
        (outcome(throughput=Throughput(output_tokens=0)), None, None, False, "failed", "not one token in any"),
        (outcome(completed=0, errors={}), None, None, False, "failed", "none was sent"),
        (outcome(client_saturated=True, client_lag_bound_s=0.005), None, None, False, "invalid", "above 5.0 ms"),
        (
            outcome(failed=3, errors={"http 503": 2, "timeout": 1}, error_details={"http 503": "busy"}),
            *(None, None, False, "ok", "2 × http 503 (busy), 1 × timeout"),
        ),
    ],
)
def test_verdicts(
    result: LoadOutcome | None, failure: str | None, code: int | None, interrupted: bool, status: str, words: str | None
) -> None:
    found, reason = verdict(result, failure, code, interrupted=interrupted)
    assert found == status
    assert reason is None if words is None else words in (reason or "")


def test_a_load_that_ran_into_its_time_limit_says_what_was_left() -> None:
    status, reason = verdict(outcome(interrupted=1, unsent=2), None, None, interrupted=False, late_s=9.0)
    assert (status, reason) == (
        "timeout",
        "the cell did not end within 9 s (1 in flight, 2 due and still waiting to be sent)",
    )


def test_requests_enough_for_a_rate_and_a_duration() -> None:
    poisson = {"name": "poisson", "rate": 10.0, "duration_s": 30.0}
    assert sized_workload({"name": "synthetic"}, poisson)["num_requests"] == 300 + 104 + 16
    assert sized_workload({"name": "synthetic", "num_requests": 5}, poisson)["num_requests"] == 5
    assert sized_workload({"name": "synthetic"}, {**poisson, "exact_rate": True})["num_requests"] == 300
    assert "num_requests" not in sized_workload({"name": "custom"}, poisson)
    assert "num_requests" not in sized_workload({"name": "synthetic"}, {"name": "concurrency", "concurrency": 2})
    users = {"name": "concurrency", "concurrency": 4, "duration_s": 10.0}
    assert sized_workload({"name": "sharegpt-like"}, users)["num_requests"] == 804
    assert sized_workload({"name": "synthetic"}, {**users, "duration_s": 1e6})["num_requests"] == 100_000


def test_a_load_that_ran_out_of_requests_says_so() -> None:
    metrics = samples.load_metrics(1, 2)
    metrics.completed, metrics.failed, metrics.excluded_warmup, metrics.excluded_cooldown = 90, 5, 3, 2
    metrics.throughput.window_start_s, metrics.throughput.window_s = 1.0, 4.0
    users = {"name": "concurrency", "concurrency": 2}
    said = ran_out({**users, "duration_s": 60.0}, 100, metrics)
    assert said is not None
    assert said.startswith("all 100 requests were answered after 5 of 60 s; give more")
    assert ran_out({**users, "duration_s": 60.0}, 101, metrics) is None, "one was not sent: the time was over"
    assert ran_out({**users, "duration_s": 5.2}, 100, metrics) is None
    assert ran_out(users, 100, metrics) is None
