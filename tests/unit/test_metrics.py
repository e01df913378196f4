"""Every metric against values computed by hand from scripted times (milliseconds)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchctl.loadgen.records import Cause, Record, TokenSource
from benchctl.metrics import Exclusion, Slo, compute_metrics, distribution, parse_exclusion, parse_slo
from reports.schema import LoadMetrics
from server.errors import UserError
from tests.unit.loadgen.recording import START_NS, record, write


@pytest.fixture
def compute(tmp_path: Path) -> Any:
    def run(records: list[Record], **options: Any) -> LoadMetrics:
        return compute_metrics(write(tmp_path / "r", records), start_ns=START_NS, **options)

    return run


def test_one_request_by_hand(compute: Any) -> None:
    # Scheduled at 100, sent 2 late, tokens at 150, 160, 180, 220.
    metrics = compute([record(0, 100, [150, 160, 180, 220], sent=102, prompt=7)])
    assert metrics.ttft_s.percentiles["p50"] == pytest.approx(0.050)
    assert metrics.ttft_from_sent_s.percentiles["p50"] == pytest.approx(0.048)
    assert metrics.e2el_s.percentiles["p50"] == pytest.approx(0.120)
    assert metrics.client_lag_s.percentiles["p99"] == pytest.approx(0.002)
    assert metrics.tpot_s.mean == pytest.approx(0.070 / 3)
    assert (metrics.itl_s.n, metrics.itl_s.min, metrics.itl_s.max) == (3, 0.010, 0.040)
    assert metrics.itl_s.percentiles["p50"] == pytest.approx(0.020)
    assert metrics.itl_per_token_s == metrics.itl_s
    assert metrics.throughput.window_s == pytest.approx(0.120)
    assert metrics.throughput.requests_per_s == pytest.approx(1 / 0.120)
    assert metrics.throughput.output_tokens_per_s == pytest.approx(4 / 0.120)
    assert metrics.throughput.total_tokens_per_s == pytest.approx(11 / 0.120)
    assert (metrics.throughput.prompt_tokens, metrics.throughput.output_tokens) == (7, 4)
    assert (metrics.completed, metrics.failed, metrics.errors) == (1, 0, {})
    assert metrics.output_token_source == "usage"
    assert metrics.steady_state is None
    assert metrics.achieved_rate is None


def test_one_token_has_no_tpot_and_no_gap(compute: Any) -> None:
    metrics = compute([record(0, 0, [30]), record(1, 10, [50])])
    assert metrics.ttft_s.mean == pytest.approx(0.035)
    assert metrics.e2el_s.mean == pytest.approx(0.035)
    assert (metrics.tpot_s.n, metrics.tpot_s.mean) == (0, None)
    assert metrics.tpot_s.reason == "no answer has tokens after its first event"
    assert (metrics.itl_s.n, metrics.itl_s.reason) == (0, "no answer has two token events")


def test_an_end_token_after_a_single_event_makes_no_tpot_of_zero(compute: Any) -> None:
    # One event of 3 tokens; the fourth, an end token, is in the usage only.
    metrics = compute([record(0, 0, [30], tokens=[3], output=4)], slos=[Slo("tpot:1ms", {"tpot": 0.001})])
    assert (metrics.tpot_s.n, metrics.tpot_s.mean) == (0, None)
    assert metrics.goodput[0].met == 0


def test_the_window_begins_with_the_first_request_even_when_it_failed(compute: Any) -> None:
    # Down for the first second: one request in two seconds, not in one.
    metrics = compute([record(0, 0, [], cause=Cause.HTTP, end=1), record(1, 1000, [1500, 2000])])
    assert (metrics.throughput.window_start_s, metrics.throughput.window_s) == (0.0, pytest.approx(2.0))
    assert metrics.throughput.requests_per_s == pytest.approx(0.5)
    assert metrics.throughput.output_tokens_per_s == pytest.approx(1.0)


def test_events_of_several_tokens_as_the_stream_says(compute: Any) -> None:
    # 2 + 3 + 1 tokens at 100, 130, 150: two gaps; per token 3 x 10 and 1 x 20; TPOT over 6 - 2 tokens.
    metrics = compute([record(0, 0, [100, 130, 150], tokens=[2, 3, 1], output=6)])
    assert (metrics.itl_s.n, metrics.itl_s.min, metrics.itl_s.max) == (2, 0.020, 0.030)
    assert (metrics.itl_per_token_s.n, metrics.itl_per_token_s.mean) == (4, pytest.approx(0.0125))
    assert metrics.tpot_s.mean == pytest.approx(0.050 / 4)


def test_events_of_several_tokens_that_the_stream_does_not_count(compute: Any) -> None:
    # 8 tokens in 2 events: spread evenly, 4 each; TPOT = 40 / (8 - 4).
    metrics = compute([record(0, 0, [100, 140], output=8)])
    assert metrics.tpot_s.mean == pytest.approx(0.010)
    assert (metrics.itl_per_token_s.n, metrics.itl_per_token_s.mean) == (4, pytest.approx(0.010))
    # All in one event: nothing after the first.
    assert compute([record(0, 0, [100], output=8)]).tpot_s.n == 0


def test_a_held_back_character_does_not_change_the_first_event(compute: Any) -> None:
    # 21 tokens in 20 events (one gave no text yet): the first event has one token, TPOT = 190 / 20.
    metrics = compute([record(0, 0, [100 + 10 * i for i in range(20)], output=21)])
    assert metrics.tpot_s.mean == pytest.approx(0.0095)


def test_failures_are_counted_by_cause_and_kept_out_of_latencies(compute: Any) -> None:
    metrics = compute(
        [
            record(0, 0, [10, 20]),
            record(1, 1, [500, 900], cause=Cause.TRUNCATED),
            record(2, 2, [], cause=Cause.HTTP, status=503, output=-1, retries=2),
            record(3, 3, [], cause=Cause.HTTP, status=503, output=-1),
            record(4, 4, [], cause=Cause.HTTP, status=429, output=-1),
            record(5, 5, [], cause=Cause.CONNECT, status=0, output=-1),
            record(6, 6, [], cause=Cause.TIMEOUT, end=60_000, output=-1),
            record(7, 7, [], cause=Cause.RESET, output=-1),
            record(8, 8, [20], cause=Cause.ERROR_EVENT, output=-1),
            record(9, 9, [20], cause=Cause.INTERRUPTED, output=-1),
        ]
    )
    assert (metrics.completed, metrics.failed, metrics.retries) == (1, 8, 2)
    assert metrics.errors == {
        "http 503": 2,
        "truncated stream": 1,
        "http 429": 1,
        "connect error": 1,
        "timeout": 1,
        "connection reset": 1,
        "error event": 1,
    }
    assert (metrics.ttft_s.n, metrics.e2el_s.n, metrics.itl_s.n) == (1, 1, 1)
    assert metrics.throughput.output_tokens == 2
    assert metrics.throughput.window_s == pytest.approx(0.020)


def test_a_stall_is_seen_by_every_request_that_was_due_in_it(compute: Any) -> None:
    # One request per 100 ms, each 10 ms of work; the server stands still from 1 s to 3 s. A tool that starts its clock
    # at sending and sends when it is free would see one slow request; counted from `scheduled`, twenty wait.
    records = []
    for index in range(40):
        due = 100.0 * index
        answered = due + 10 if not 1000 <= due < 3000 else 3000 + 10
        records.append(record(index, due, [answered], sent=max(due, 3000) if 1000 <= due < 3000 else due))
    metrics = compute(records)
    assert metrics.ttft_s.percentiles["p50"] == pytest.approx(0.060, abs=0.051)
    assert metrics.ttft_s.percentiles["p90"] == pytest.approx(1.61, abs=0.11)
    assert metrics.ttft_s.max == pytest.approx(2.010)
    assert metrics.ttft_from_sent_s.max == pytest.approx(0.010)
    assert sum(1 for r in records if (r.times_ns[0] - r.scheduled_ns) > 11_000_000) == 20


def test_goodput_needs_every_objective_and_a_null_never_passes(compute: Any) -> None:
    records = [
        record(0, 0, [100, 110]),  # ttft 100, tpot 10
        record(1, 0, [300, 310]),  # ttft too late
        record(2, 0, [100, 200]),  # tpot too slow
        record(3, 0, [100]),  # no tpot
        record(4, 0, [], cause=Cause.TIMEOUT, output=-1, end=1000),
    ]
    slos = [parse_slo("ttft:200ms tpot:20ms"), parse_slo("ttft:200ms"), parse_slo("e2el:50ms")]
    both, ttft, e2el = compute(records, slos=slos).goodput
    assert (both.met, both.total, both.share) == (1, 5, 0.2)
    assert both.requests_per_s == pytest.approx(1 / 0.310)
    assert (ttft.met, ttft.slo) == (3, "ttft:200ms")
    assert (e2el.met, e2el.share, e2el.requests_per_s) == (0, 0.0, 0.0)


def test_an_answer_without_tokens_has_null_latencies(compute: Any) -> None:
    metrics = compute([record(0, 0, [], end=40, output=0)], slos=[parse_slo("ttft:1s")])
    assert metrics.completed == 1
    assert (metrics.ttft_s.n, metrics.ttft_s.reason) == (0, "no completed request has one")
    assert metrics.output_tokens.mean == 0
    assert metrics.goodput[0].met == 0


def test_nothing_at_all_is_null_with_reasons(compute: Any) -> None:
    metrics = compute([], slos=[parse_slo("ttft:1s")])
    for name in ("ttft_s", "itl_s", "tpot_s", "e2el_s", "client_lag_s", "prompt_tokens", "output_tokens"):
        values = getattr(metrics, name)
        assert (values.n, values.mean, values.percentiles) == (0, None, {})
        assert values.reason
    assert metrics.throughput.requests_per_s is None
    assert metrics.goodput[0].share is None
    assert metrics.timeseries == {}


def test_client_lag_leaves_out_waits_that_are_not_the_clients(compute: Any) -> None:
    # Due at 0, let go by the cap at 80, sent at 81: TTFT counts from 0, lag from 80.
    metrics = compute([record(0, 0, [100], ready=80, sent=81)])
    assert metrics.ttft_s.mean == pytest.approx(0.100)
    assert metrics.client_lag_s.mean == pytest.approx(0.001)
    assert not metrics.client_saturated


@pytest.mark.parametrize(("lag", "ttft", "saturated", "bound"), [
    (6, 20, True, 0.005), (4, 20, False, 0.005), (15, 200, False, 0.020), (25, 200, True, 0.020),
])  # fmt: skip
def test_a_saturated_client_is_told(compute: Any, lag: float, ttft: float, saturated: bool, bound: float) -> None:
    metrics = compute([record(i, 1000 * i, [1000 * i + ttft], sent=1000 * i + lag) for i in range(50)])
    assert metrics.client_saturated is saturated
    assert metrics.client_lag_bound_s == pytest.approx(bound)


def test_rates_offered_and_achieved(compute: Any) -> None:
    metrics = compute([record(i, 100 * i, [100 * i + 5]) for i in range(11)], offered_rate=10.5)
    assert metrics.achieved_rate == pytest.approx(10.0)
    assert metrics.offered_rate == 10.5


def test_warm_up_and_cool_down_by_time_number_and_share(compute: Any) -> None:
    records = [record(i, 1000 * i, [1000 * i + 10 * (i + 1)]) for i in range(10)]
    for warmup, cooldown in (("2s", "1s"), ("2", "1"), ("20%", "10%")):
        metrics = compute(
            records, warmup=parse_exclusion(warmup, "--warmup"), cooldown=parse_exclusion(cooldown, "--cooldown")
        )
        assert (metrics.excluded_warmup, metrics.excluded_cooldown) == (2, 1)
        assert metrics.completed == 7
        assert (metrics.ttft_s.min, metrics.ttft_s.max) == (pytest.approx(0.030), pytest.approx(0.090))
        assert metrics.throughput.window_s == pytest.approx(6.090)
        assert metrics.throughput.requests_per_s == pytest.approx(7 / 6.090)


def test_excluded_requests_give_no_gaps_either(compute: Any) -> None:
    metrics = compute([record(0, 0, [10, 500]), record(1, 1000, [1010, 1020])], warmup=parse_exclusion("1", "-"))
    assert (metrics.itl_s.n, metrics.itl_s.max) == (1, 0.010)


def test_the_steady_state_leaves_out_ramp_and_drain(compute: Any) -> None:
    # A request per 100 ms, 10 tokens over 1 s: ten in flight after 1 s; the last starts at 9.9 s.
    records = [record(i, 100 * i, [100 * i + 100 * k for k in range(1, 11)], prompt=5) for i in range(100)]
    metrics = compute(records)
    steady = metrics.steady_state
    assert steady is not None
    assert steady.window_start_s == pytest.approx(0.9, abs=0.11)
    assert steady.window_s == pytest.approx(9.9 - steady.window_start_s)
    assert steady.output_tokens_per_s == pytest.approx(100, rel=0.02)
    assert steady.requests_per_s == pytest.approx(10, rel=0.03)
    assert steady.total_tokens_per_s == pytest.approx(150, rel=0.02)
    assert metrics.throughput.output_tokens_per_s == pytest.approx(1000 / 10.9)
    assert metrics.steady_ttft_s is not None
    assert metrics.steady_ttft_s.mean == pytest.approx(0.1)


def test_timeseries_per_second(compute: Any) -> None:
    records = [record(0, 0, [200, 1200, 2200], output=3), record(1, 400, [700], output=1), record(2, 2100, [2300])]
    series = compute(records).timeseries
    assert series["t"] == [0.0, 1.0, 2.0]
    assert series["output_tokens_per_s"] == [2.0, 1.0, 2.0]
    assert series["completed_per_s"] == [1.0, 0.0, 2.0]
    assert series["requests_in_flight"] == [2.0, 1.0, 0.0]
    assert series["ttft_p50_s"] == [pytest.approx(0.25), None, pytest.approx(0.2)]


def test_token_sources(compute: Any) -> None:
    by_events = record(0, 0, [10, 20], source=TokenSource.EVENTS)
    assert compute([by_events]).output_token_source == "events"
    assert compute([by_events, record(1, 0, [10])]).output_token_source == "mixed"
    unknown = compute([record(0, 0, [10, 20], prompt=-1)])
    assert unknown.prompt_tokens.reason == "the server gives no usage"
    assert unknown.throughput.total_tokens_per_s is None
    assert unknown.throughput.output_tokens_per_s is not None


def test_columns_and_blocks_stay_together_around_interrupted_requests(compute: Any) -> None:
    # Interrupted rows are dropped from the columns but not from the blocks: TPOT must still land at its request.
    records = [
        record(0, 0, [10, 20], cause=Cause.INTERRUPTED),
        record(1, 0, [10, 40]),
        record(2, 0, [10], cause=Cause.INTERRUPTED),
        record(3, 0, [10, 110]),
        record(4, 0, [10, 12], cause=Cause.RESET),
        record(5, 0, [10, 1010]),
    ]
    metrics = compute(records, slos=[parse_slo("tpot:50ms"), parse_slo("tpot:200ms")])
    assert (metrics.tpot_s.n, metrics.tpot_s.min, metrics.tpot_s.max) == (3, pytest.approx(0.03), pytest.approx(1.0))
    assert [goodput.met for goodput in metrics.goodput] == [1, 2]


def test_requests_that_an_interrupt_ended_were_sent(compute: Any) -> None:
    metrics = compute([record(n, 500 * n, [], cause=Cause.INTERRUPTED, prompt=-1) for n in range(3)])
    assert (metrics.completed, metrics.failed, metrics.achieved_rate) == (0, 0, pytest.approx(2.0))
    assert metrics.client_lag_s.reason == "no request ended"
    assert metrics.prompt_tokens.reason == "no request was completed"


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ttft:200ms tpot:20ms e2el:5s", {"ttft": 0.2, "tpot": 0.02, "e2el": 5.0}),
        ("ttft:1.5s,tpot=500us", {"ttft": 1.5, "tpot": 0.0005}),
        ("e2el:2m", {"e2el": 120.0}),
    ],
)
def test_slos_parse(text: str, limits: dict[str, float]) -> None:
    assert parse_slo(text).limits == pytest.approx(limits)


@pytest.mark.parametrize("text", ["", "ttft", "ttft:200", "itl:5ms", "ttft:-1s", "ttft:1s ttft:2s", "ttft:1h"])
def test_bad_slos_say_how_it_goes(text: str) -> None:
    with pytest.raises(UserError, match=r"ttft:200ms|twice"):
        parse_slo(text)


@pytest.mark.parametrize("text", ["", "x", "-1s", "1.5", "100%", "5h", "nan"])
def test_bad_exclusions_name_the_option(text: str) -> None:
    with pytest.raises(UserError, match="--warmup"):
        parse_exclusion(text, "--warmup")


def test_exclusions_parse() -> None:
    assert parse_exclusion("500ms", "-") == Exclusion(0.5, "s")
    assert parse_exclusion("7", "-") == Exclusion(7, "requests")
    assert parse_exclusion("12.5%", "-") == Exclusion(0.125, "share")
    assert parse_slo(" ttft:1s ") == Slo("ttft:1s", {"ttft": 1.0})


def test_distributions_leave_nan_out() -> None:
    found = distribution(np.array([1.0, np.nan, 3.0]), "none")
    assert (found.n, found.mean, found.percentiles["p50"]) == (2, 2.0, 2.0)
    assert distribution([np.nan], "none").reason == "none"


def test_answers_are_held_against_their_forced_lengths(compute: Any) -> None:
    forced = np.array([3, 3, 0, 2, 3], np.int32)
    records = [
        record(0, 0, [10, 20, 30]),
        record(1, 0, [10]),
        record(2, 0, [10]),
        record(3, 0, [10, 20, 30]),
        record(4, 0, [10], cause=Cause.RESET),
    ]
    metrics = compute(records, forced_lengths=forced)
    assert (metrics.forced_output_tokens, metrics.throughput.output_tokens) == (3 + 3 + 1 + 2, 8)
    assert (metrics.shorter_answers, metrics.longer_answers) == (1, 1)
    assert compute(records).forced_output_tokens is None
    assert compute(records, forced_lengths=np.zeros(5, np.int32)).forced_output_tokens is None


def test_counts_that_are_not_the_servers_may_be_a_tenth_off(compute: Any) -> None:
    forced = np.array([20, 20, 20], np.int32)
    records = [record(n, 0, [10], output=count, source=TokenSource.EVENTS) for n, count in enumerate((18, 17, 22))]
    metrics = compute(records, forced_lengths=forced)
    assert (metrics.shorter_answers, metrics.longer_answers) == (1, 0)
