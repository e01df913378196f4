"""Where requests go, what they look like, and who sends which."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest

from benchctl.loadgen.assign import split
from benchctl.loadgen.endpoint import RequestEncoder, parse_endpoint
from benchctl.loadgen.options import default_workers
from server.errors import UserError
from workloads import build_workload
from workloads.arrivals import build_schedule
from workloads.base import Message, WorkloadRequest


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "path", "authority"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, False, "/v1/completions", "127.0.0.1:8000"),
        ("http://h:8000/v1/", "h", 8000, False, "/v1/completions", "h:8000"),
        (
            "https://api.example.com/openai/v1",
            "api.example.com",
            443,
            True,
            "/openai/v1/completions",
            "api.example.com",
        ),
        ("h:81", "h", 81, False, "/v1/completions", "h:81"),
        ("http://[::1]:9", "::1", 9, False, "/v1/completions", "[::1]:9"),
    ],
)
def test_urls(url: str, host: str, port: int, tls: bool, path: str, authority: str) -> None:
    endpoint = parse_endpoint(url, "completions")
    found = (endpoint.host, endpoint.port, endpoint.tls, endpoint.path, endpoint.authority)
    assert found == (host, port, tls, path, authority)


@pytest.mark.parametrize("url", ["", "http://", "ftp://h", "http://h:x", "http://h:99999", "http://a b", "http://u@h"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(UserError, match="--url"):
        parse_endpoint(url, "chat")


def encode(request: WorkloadRequest, history: tuple[Message, ...] = (), **options: Any) -> tuple[bytes, dict[str, Any]]:
    chat = options.pop("chat", False)
    defaults = {"model": "m", "api_key": None, "force_lengths": True, "continuous_usage": False}
    endpoint = parse_endpoint("http://h:1", "chat" if chat else "completions")
    data = RequestEncoder(endpoint, chat=chat, **{**defaults, **options}).encode(request, history)
    head, _, body = data.partition(b"\r\n\r\n")
    assert int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) == len(body)
    return head, json.loads(body)


def test_requests_on_the_wire() -> None:
    ids = WorkloadRequest(index=7, prompt_token_ids=[1, 2, 3], max_tokens=5)
    head, body = encode(ids)
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert b"X-Request-Id: 7\r\n" in head
    assert b"Authorization" not in head
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert b"Authorization: Bearer k\r\n" in encode(ids, api_key="k")[0]
    assert "ignore_eos" not in encode(ids, force_lengths=False)[1]
    assert encode(ids, continuous_usage=True)[1]["stream_options"]["continuous_usage_stats"] is True
    free = WorkloadRequest(
        index=0, prompt="hi", max_tokens=5, ignore_eos=False, extra_body={"temperature": 0.7, "seed": 1}
    )
    _, body = encode(free)
    assert (body["prompt"], body["temperature"], body["seed"]) == ("hi", 0.7, 1)
    assert "ignore_eos" not in body


def test_chat_requests_and_histories() -> None:
    turn = WorkloadRequest(index=0, messages=[Message("user", "and?")], max_tokens=5, append_reply=True)
    history = (Message("user", "hi"), Message("assistant", "ho"))
    head, body = encode(turn, history, chat=True)
    assert head.startswith(b"POST /v1/chat/completions ")
    assert body["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "and?"},
    ]
    assert encode(turn, history)[1]["prompt"] == "hi\n\nho\n\nand?"
    plain = WorkloadRequest(index=0, prompt="hi", max_tokens=5)
    assert encode(plain, chat=True)[1]["messages"] == [{"role": "user", "content": "hi"}]
    with pytest.raises(UserError, match="--endpoint completions"):
        encode(WorkloadRequest(index=0, prompt_token_ids=[1], max_tokens=1), chat=True)


def plain_requests(n: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(index=i, prompt="x", max_tokens=1) for i in range(n)]


def test_the_schedule_is_dealt_out_whole() -> None:
    schedule = build_schedule({"name": "poisson", "rate": 5}, 11, 3)
    assert schedule.times_s is not None
    shares = split(plain_requests(11), schedule, 3)
    assert [share.first.tolist() for share in shares] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]
    for share in shares:
        assert share.times_ns is not None
        assert share.times_ns.tolist() == np.round(schedule.times_s[share.first] * 1e9).astype(int).tolist()
        assert isinstance(share.requests, dict)
        assert sorted(share.requests) == share.first.tolist()


@pytest.mark.parametrize(("users", "workers", "split_users"), [(7, 3, [3, 2, 2]), (2, 8, [1, 1]), (1, 4, [1])])
def test_users_are_divided(users: int, workers: int, split_users: list[int]) -> None:
    schedule = build_schedule({"name": "concurrency", "concurrency": users}, 20, 0)
    shares = split(plain_requests(20), schedule, workers)
    assert [share.concurrency for share in shares] == split_users
    assert sorted(position for share in shares for position in share.first.tolist()) == list(range(20))


def test_there_are_never_more_workers_than_requests() -> None:
    assert len(split(plain_requests(2), build_schedule({"name": "burst"}, 2, 0), 8)) == 2


@pytest.mark.parametrize(
    ("cores", "offered_rate", "workers"),
    [(1, None, 1), (1, 1000.0, 1), (2, None, 1), (2, 16.0, 1), (2, 1000.0, 2), (16, 16.0, 8), (64, 1000.0, 8)],
)
def test_dense_arrivals_are_sent_by_two_workers(
    monkeypatch: pytest.MonkeyPatch, cores: int, offered_rate: float | None, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert default_workers(offered_rate) == workers


def test_a_conversation_stays_with_its_worker_in_the_order_of_its_turns() -> None:
    requests = [
        WorkloadRequest(index=i, prompt="x", max_tokens=1, conversation=i % 2, turn=turn)
        for i, turn in enumerate([1, 0, 0, 1, 2, 2])
    ] + [WorkloadRequest(index=6, prompt="x", max_tokens=1)]
    schedule = build_schedule({"name": "constant", "rate": 1}, 7, 0)
    shares = split(requests, schedule, 2)
    assert [(share.first.tolist(), share.later) for share in shares] == [
        ([2, 6], {2: [0, 4]}),
        ([1], {1: [3, 5]}),
    ]
    assert shares[0].turn_times_ns == {0: 0, 4: 4_000_000_000}


def test_a_schedule_that_ends_before_the_workload() -> None:
    schedule = build_schedule({"name": "constant", "rate": 10, "duration_s": 0.5}, 100, 0)
    shares = split(plain_requests(100), schedule, 2)
    assert sum(len(share.first) for share in shares) == 5


def test_generated_workloads_travel_whole() -> None:
    spec = {"name": "synthetic", "num_requests": 1_000_000, "input_len": 8, "output_len": 2}
    workload = build_workload(spec, seed=0, tokenizer=None)
    shares = split(workload.requests, build_schedule({"name": "constant", "rate": 1000}, 1_000_000, 0), 4)
    assert [len(share.first) for share in shares] == [250_000] * 4
    assert all(share.requests is workload.requests for share in shares)
