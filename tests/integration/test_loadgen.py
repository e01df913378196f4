"""The load generator against a mock whose every write is on record by its own clock."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchctl.loadgen import pool
from benchctl.loadgen.assign import split
from benchctl.loadgen.options import LoadOptions
from benchctl.loadgen.records import RecordFile, Records, create_records
from benchctl.loadgen.run import run_load
from benchctl.loadgen.worker import LoadWorker
from benchctl.matrix.progress import Progress
from benchctl.metrics import compute_metrics
from benchctl.mock.script import Failure, Stall
from tests.integration.mocking import load, load_here, read_log, running_mock, synthetic
from workloads.arrivals import build_schedule
from workloads.base import Message, Workload, WorkloadRequest


@pytest.mark.parametrize(("endpoint", "workers"), [("completions", 1), ("completions", 3), ("chat", 2)])
def test_metrics_are_those_of_the_mocks_clock(tmp_path: Path, endpoint: Any, workers: int) -> None:
    log = tmp_path / "log"
    workload = synthetic(12, output_len=10)
    if endpoint == "chat":
        requests = [
            WorkloadRequest(index=i, messages=[Message("user", "hello")], max_tokens=10, ignore_eos=True)
            for i in range(12)
        ]
        workload = Workload(name="chat", parameters={}, seed=0, requests=requests)
    script = {"ttft_s": 0.03, "itl_s": 0.02, "events_per_write": 2, "tokens_per_event": 2, "stalls": (Stall(2, 0.1),)}
    with running_mock(log=str(log), **script) as mock:
        outcome = load(
            mock.url,
            workload,
            {"name": "concurrency", "concurrency": 4},
            tmp_path / "r",
            endpoint=endpoint,
            workers=workers,
            continuous_usage=True,
        )
    metrics, truth = outcome.metrics, read_log(log)
    assert (metrics.completed, metrics.failed, metrics.workers) == (12, 0, workers)
    assert metrics.output_token_source == "usage"
    assert metrics.throughput.output_tokens == 120
    # 10 tokens are 5 events in 3 writes, at 30, 150 (the stall) and 170 ms: gaps of 0, 120, 0 and 20 ms.
    assert metrics.itl_s.n == 12 * 4
    assert metrics.itl_per_token_s.n == 12 * 8
    records = Records(outcome.records)
    for row in records.rows:
        entry = truth[int(row["index"])]
        assert entry["events"] == [2, 2, 1]
        assert row["sent_ns"] > 0
        # Nothing is seen before it is sent; how long after is the machine's business.
        assert row["first_ns"] >= entry["writes_ns"][0]
        assert row["last_ns"] >= entry["writes_ns"][-1]
        assert row["scheduled_ns"] <= row["ready_ns"] <= row["sent_ns"] < entry["writes_ns"][0]
        assert row["n_events"] == 5
        assert row["output_tokens"] == 10
    writes = np.array([entry["writes_ns"] for entry in truth.values()]) / 1e9
    received = np.array([entry["received_ns"] for entry in truth.values()]) / 1e9
    median = metrics.ttft_from_sent_s.percentiles["p50"]
    assert median == pytest.approx(float(np.median(writes[:, 0] - received)), abs=0.05)
    tpot = metrics.tpot_s.percentiles["p50"]
    assert tpot == pytest.approx(float(np.median((writes[:, 2] - writes[:, 0]) / 8)), abs=0.01)


def test_an_open_loop_keeps_its_schedule_while_the_server_stands_still(tmp_path: Path) -> None:
    arrival = {"name": "constant", "rate": 50}
    with running_mock(ttft_s=0.5) as mock:
        outcome = load(mock.url, synthetic(25, output_len=1), arrival, tmp_path / "r")
    rows = np.sort(Records(outcome.records).rows, order="index")
    # All 25 are sent within the 480 ms of the schedule, before the first answer.
    assert np.diff(rows["scheduled_ns"]).tolist() == [20_000_000] * 24
    assert (rows["sent_ns"] >= rows["scheduled_ns"]).all()
    assert rows["sent_ns"].max() < rows["first_ns"].min() + 400_000_000
    assert outcome.metrics.ttft_s.min is not None
    assert outcome.metrics.ttft_s.min >= 0.5


@pytest.mark.parametrize("arrival", [{"name": "burst"}, {"name": "concurrency", "concurrency": 300}])
def test_a_burst_is_sent_at_once_over_any_number_of_connections(
    tmp_path: Path, arrival: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More at once than connections are opened at once: none may wait for an answer to another."""
    monkeypatch.setattr(pool, "MOST_CONNECTING", 20)
    with running_mock(ttft_s=2.0) as mock:
        outcome = load_here(mock.url, synthetic(300, output_len=1), arrival, tmp_path / "r")
        assert mock.accepted == 300
    rows = Records(outcome.records).rows
    assert outcome.metrics.completed == 300
    assert rows["sent_ns"].max() < rows["first_ns"].min()


def test_the_cap_holds_and_its_wait_counts_in_ttft_but_not_in_lag(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_mock(ttft_s=0.1, log=str(log)) as mock:
        outcome = load(
            mock.url, synthetic(6, output_len=1), {"name": "burst", "max_concurrency": 2}, tmp_path / "r", workers=2
        )
    rows = Records(outcome.records).rows
    for row in rows:
        at_once = (rows["sent_ns"] <= row["sent_ns"]) & (rows["end_ns"] > row["sent_ns"])
        assert at_once.sum() <= 2
    metrics = outcome.metrics
    assert (metrics.ttft_s.max or 0) >= 0.3
    assert (metrics.ttft_from_sent_s.percentiles["p50"] or 1) < 0.25
    assert (metrics.client_lag_s.percentiles["p50"] or 0) < 0.09
    assert len(set(rows["scheduled_ns"].tolist())) == 1


def test_poisson_arrivals_stay_poisson(tmp_path: Path) -> None:
    with running_mock() as mock:
        outcome = load(
            mock.url, synthetic(400, output_len=1), {"name": "poisson", "rate": 200}, tmp_path / "r", workers=2
        )
    rows = np.sort(Records(outcome.records).rows, order="index")
    assert outcome.metrics.completed == 400
    scheduled = np.diff(rows["scheduled_ns"]) / 1e9
    assert stats.kstest(scheduled, "expon", args=(0, 1 / 200)).pvalue > 0.01
    # What was sent is the schedule plus a lag: on a busy machine some are late, none is early, most are on time.
    lag = (rows["sent_ns"] - rows["scheduled_ns"]) / 1e9
    assert lag.min() >= 0
    on_time = lag < 0.001
    if on_time.mean() > 0.9:
        sent = np.sort(rows["sent_ns"]) / 1e9
        assert stats.kstest(np.diff(sent), "expon", args=(0, 1 / 200)).pvalue > 0.001
    assert outcome.metrics.achieved_rate == pytest.approx(outcome.metrics.offered_rate, rel=0.05)


def test_users_of_a_closed_loop_send_when_they_are_free(tmp_path: Path) -> None:
    with running_mock(ttft_s=0.01) as mock:
        outcome = load(mock.url, synthetic(30, output_len=1), {"name": "concurrency", "concurrency": 3}, tmp_path / "r")
    rows = Records(outcome.records).rows
    assert sorted(rows["index"].tolist()) == list(range(30))
    assert set(rows["ready_ns"] - rows["scheduled_ns"]) == {0}
    # Each request after the first three was due when another ended.
    ends = set(rows["end_ns"].tolist())
    later = np.sort(rows["scheduled_ns"])[3:]
    assert all(due in ends for due in later.tolist())


def test_a_closed_loop_ends_by_time(tmp_path: Path) -> None:
    arrival = {"name": "concurrency", "concurrency": 2, "duration_s": 0.4}
    with running_mock(ttft_s=0.02) as mock:
        outcome = load(mock.url, synthetic(5000, output_len=2), arrival, tmp_path / "r")
    rows = Records(outcome.records).rows
    assert 2 <= outcome.metrics.completed < 200
    assert not outcome.interrupted
    assert (rows["scheduled_ns"] - rows["scheduled_ns"].min()).max() < 400_000_000


def conversation(turns: int, number: int, *, think: float, append: bool) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(
            index=number * turns + turn,
            messages=[Message("user", f"turn {turn}")],
            max_tokens=2,
            conversation=number,
            turn=turn,
            think_time_s=think if turn else 0.0,
            append_reply=append,
        )
        for turn in range(turns)
    ]


@pytest.mark.parametrize("arrival", [{"name": "burst"}, {"name": "concurrency", "concurrency": 2}])
def test_turns_follow_the_answer_before_them_and_carry_it(
    tmp_path: Path, arrival: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchctl.mock import server as mock_server

    bodies: list[bytes] = []
    decode = mock_server.decode_request

    def spy(body: bytes) -> Any:
        bodies.append(bytes(body))
        return decode(body)

    monkeypatch.setattr(mock_server, "decode_request", spy)
    requests = [request for number in range(2) for request in conversation(3, number, think=0.05, append=True)]
    workload = Workload(name="talk", parameters={}, seed=0, requests=requests)
    with running_mock() as mock:
        outcome = load(mock.url, workload, arrival, tmp_path / "r", endpoint="chat", workers=2)
    assert outcome.metrics.completed == 6
    rows = {int(row["index"]): row for row in Records(outcome.records).rows}
    for number in range(2):
        turns = [rows[number * 3 + turn] for turn in range(3)]
        assert len({int(row["worker"]) for row in turns}) == 1
        for before, after in itertools.pairwise(turns):
            assert after["scheduled_ns"] == before["end_ns"] + 50_000_000
            assert after["sent_ns"] >= after["scheduled_ns"]
    longest = max(bodies, key=len).decode()
    reply = '{"role":"assistant","content":" token token"}'
    assert longest.index("turn 0") < longest.index(reply) < longest.index("turn 1") < longest.rindex(reply)
    assert longest.rindex(reply) < longest.index("turn 2")


def test_the_schedule_of_a_run_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    times = []
    for workers in (1, 3):
        with running_mock() as mock:
            outcome = load(
                mock.url, synthetic(30, 1), {"name": "poisson", "rate": 300}, tmp_path / "r", workers=workers
            )
        rows = np.sort(Records(outcome.records).rows, order="index")
        times.append((rows["scheduled_ns"] - rows["scheduled_ns"].min()).tolist())
    assert times[0] == times[1]


def test_progress_is_told_and_ends_with_the_whole(tmp_path: Path) -> None:
    seen: list[Progress] = []
    workload = synthetic(20, output_len=4)
    with running_mock(ttft_s=0.05) as mock:
        from benchctl.loadgen.options import LoadOptions

        run_load(
            LoadOptions(url=mock.url, model="mock", workers=2),
            workload,
            build_schedule({"name": "concurrency", "concurrency": 2}, 20, 0),
            output=tmp_path / "r",
            on_progress=seen.append,
        )
    assert [p.completed for p in seen] == sorted(p.completed for p in seen)
    assert (seen[-1].completed, seen[-1].failed, seen[-1].in_flight, seen[-1].total) == (20, 0, 0, 20)
    assert seen[-1].ttft_p50_s is not None


def test_cancelling_keeps_what_has_ended(tmp_path: Path) -> None:
    cancel = threading.Event()
    timer = threading.Timer(0.8, cancel.set)
    timer.start()
    began = time.monotonic()
    with running_mock(ttft_s=0.05, itl_s=0.01) as mock:
        outcome = load(
            mock.url,
            synthetic(100_000, 5),
            {"name": "concurrency", "concurrency": 4},
            tmp_path / "r",
            cancel=cancel,
            workers=2,
        )
    timer.join()
    assert outcome.interrupted
    assert time.monotonic() - began < 60
    rows = Records(outcome.records).rows
    assert outcome.metrics.completed == (rows["cause"] == 0).sum()
    assert outcome.metrics.failed == 0
    assert outcome.metrics.completed < 1000


@pytest.mark.parametrize("places", [2, 1000])
def test_cancelling_counts_what_was_due_and_not_sent(
    tmp_path: Path, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 are due at once and more later; the cap (2) or connections that do not come about hold most of them back."""
    monkeypatch.setattr(pool, "MOST_CONNECTING", 5)
    trace = [0.0] * 30 + [600.0] * 10
    schedule = build_schedule({"name": "trace", "max_concurrency": places}, 40, 0, timestamps_s=trace)

    async def serve(address: str) -> None:
        records = RecordFile(tmp_path / "r")
        (share,) = split(synthetic(40, 1).requests, schedule, 1)
        worker = LoadWorker(share, LoadOptions(url=address, model="mock"), records, lambda report: None)
        running = asyncio.ensure_future(worker.run(time.monotonic_ns()))
        while mock.requests < 2:  # noqa: ASYNC110, it lives in another thread
            await asyncio.sleep(0.001)
        worker.cancel()
        worker.cancel()  # a second one finds nothing left
        await running
        records.close()

    create_records(tmp_path / "r", {"start_ns": 1})
    with running_mock(ttft_s=600) as mock:
        asyncio.run(serve(mock.url))
    records = Records(tmp_path / "r")
    metrics = compute_metrics(records, start_ns=1)
    assert sorted(records.rows["index"].tolist()) == list(range(30)), "each that was due, once"
    assert (metrics.completed, metrics.failed, metrics.interrupted + metrics.unsent) == (0, 0, 30)
    if places == 2:
        assert (metrics.interrupted, metrics.unsent) == (2, 28)


def test_cancelling_counts_requests_that_wait_for_a_retry(tmp_path: Path) -> None:
    with running_mock(failures=(Failure("503", 1),)) as mock:
        cancel = threading.Event()
        outcome = load(
            mock.url,
            synthetic(3, 1),
            {"name": "burst"},
            tmp_path / "r",
            cancel=cancel,
            retries=100,
            on_progress=lambda progress: cancel.set() if mock.requests >= 3 else None,
        )
    assert outcome.interrupted
    assert (outcome.metrics.completed, outcome.metrics.failed, outcome.metrics.interrupted) == (0, 0, 3)


def test_connections_are_reused(tmp_path: Path) -> None:
    with running_mock() as mock:
        load(mock.url, synthetic(200, 2), {"name": "concurrency", "concurrency": 4}, tmp_path / "r")
        assert mock.accepted == 4
