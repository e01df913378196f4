"""What is said while a large workload is read: nothing of a small one, a line in a log, a drawn line on a terminal."""

from __future__ import annotations

import msgspec
import pytest

from benchctl import preparing as module
from benchctl.matrix.traffic import describe
from benchctl.preparing import Preparing, preparing
from workloads import build_workload
from workloads.base import Workload, WorkloadRequest, read_requests
from workloads.summary import summarise


def read(*, drawn: bool, seconds_each: float) -> tuple[list[str], list[str]]:
    """What is said of 10,000 requests whose every thousand takes `seconds_each`, and how often it was over."""
    said: list[str] = []
    over: list[str] = []
    now = 0.0

    def clock() -> float:
        return now

    on_read = Preparing(said.append, drawn=drawn, over=lambda: over.append("over"), clock=clock)
    for thousand in range(11):
        on_read(1000 * thousand, 10_000)
        now += seconds_each
    return said, over


def test_a_workload_that_is_read_at_once_is_not_worth_a_word() -> None:
    assert read(drawn=True, seconds_each=0.05) == ([], ["over"])


def test_a_log_gets_one_line() -> None:
    (line,), _ = read(drawn=False, seconds_each=3.0)
    assert line.startswith("preparing 10,000 requests: ")


def test_a_terminal_is_told_again_and_again() -> None:
    said, over = read(drawn=True, seconds_each=0.5)
    assert said == [f"preparing 10,000 requests: {percent}%" for percent in range(20, 100, 10)]
    assert over == ["over"]


def test_standard_error_has_the_line_and_standard_output_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_SILENT_S", 0.0)
    workload = build_workload({"name": "synthetic", "num_requests": 3000, "input_len": 1}, seed=0, tokenizer=None)
    with preparing() as on_read:
        summarise(workload, None, on_read=on_read)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["preparing 3,000 requests: every prompt is made once, for the digest of all"]


class _Counting(list[WorkloadRequest]):
    """Counts how often its requests are looked at."""

    reads = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        raise AssertionError("one after another is enough")

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__iter__()


def test_every_prompt_is_made_once_to_say_what_a_workload_holds() -> None:
    plain = build_workload({"name": "synthetic", "num_requests": 7, "input_len": 5}, seed=3, tokenizer=None)
    counting = _Counting(list(plain.requests))
    workload: Workload = msgspec.structs.replace(plain, requests=counting)
    info, forced_lengths = describe(workload)
    assert counting.reads == 1
    assert (info.digest, info.requests, info.forced_lengths) == (plain.digest, 7, True)
    assert (info.prompt_tokens_total, info.output_tokens_requested) == (35, 7 * 128)
    assert forced_lengths.tolist() == [128] * 7
    assert summarise(workload, None, samples=0).digest == plain.digest
    assert counting.reads == 2


def test_totals_of_what_was_not_counted_are_not_known() -> None:
    requests = [WorkloadRequest(index=i, prompt="x", prompt_tokens=n, max_tokens=2) for i, n in enumerate((4, None, 5))]
    requests[0].ignore_eos = False
    info, forced_lengths = describe(Workload(name="w", parameters={}, seed=0, requests=requests))
    assert (info.prompt_tokens_total, info.output_tokens_requested, info.forced_lengths) == (None, 6, False)
    assert forced_lengths.tolist() == [0, 2, 2]


def test_a_reader_is_told_at_the_start_now_and_then_and_at_the_end() -> None:
    requests = [WorkloadRequest(index=i, prompt="x", max_tokens=1) for i in range(2500)]
    told: list[tuple[int, int]] = []
    assert list(read_requests(requests, lambda done, total: told.append((done, total)))) == requests
    assert told == [(0, 2500), (1024, 2500), (2048, 2500), (2500, 2500)]
