"""The mock does what its script says, and says what it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchctl.mock.script import Failure, MockOptions, Stall, check_options, parse_failures, parse_stalls
from server.errors import UserError
from tests.integration.mocking import read_log, running_mock


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, trust_env=False)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "mock", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True, **fields}


def stream(url: str, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    """The JSON of every event; `[DONE]` as text."""
    with client(url) as http, http.stream("POST", path, json=body(**fields), headers={"x-request-id": "7"}) as response:
        assert response.status_code == 200
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_a_completion(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_mock(events_per_write=2, tokens_per_event=2, log=str(log)) as mock:
        events = stream(mock.url, stream_options={"include_usage": True})
    texts = [event["choices"][0]["text"] for event in events[:3]]
    assert texts == [" token token", " token token", " token"]
    assert events[3]["choices"][0]["finish_reason"] == "length"
    assert events[4]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert events[5] == "[DONE]"
    entry = read_log(log)[7]
    assert entry["events"] == [2, 1]
    assert entry["received_ns"] <= entry["writes_ns"][0] <= entry["writes_ns"][1]


def test_a_chat_completion_with_usage_in_every_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with running_mock() as mock:
        events = stream(mock.url, "/v1/chat/completions", max_tokens=2, stream_options=options)
    assert [event["choices"][0]["delta"] for event in events[:3]] == [{"content": " token"}, {"content": " token"}, {}]
    assert [event["usage"]["completion_tokens"] for event in events[:2]] == [1, 2]


def test_the_openai_client_understands_it() -> None:
    with running_mock() as mock, openai.OpenAI(base_url=f"{mock.url}/v1", api_key="none") as api:
        whole = api.completions.create(model="mock", prompt="a b", max_tokens=3)
        chunks = list(
            api.chat.completions.create(
                model="mock", messages=[{"role": "user", "content": "a"}], max_tokens=3, stream=True
            )
        )
        assert [model.id for model in api.models.list()] == ["mock"]
    assert whole.choices[0].text == " token token token"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " token token token"


def test_times_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stalls = (Stall(0, 0.02), Stall(2, 0.1))
    with running_mock(ttft_s=0.03, itl_s=0.02, stalls=stalls, log=str(log)) as mock:
        stream(mock.url)
    entry = read_log(log)[7]
    due = [0.05, 0.07, 0.19, 0.21, 0.23]
    for write, expected in zip(entry["writes_ns"], due, strict=True):
        late = (write - entry["received_ns"]) / 1e9 - expected
        assert 0 <= late < 1  # never early; how late is the machine's business


def test_other_paths_and_bad_requests() -> None:
    with running_mock() as mock, client(mock.url) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/nowhere").status_code == 404
        bad = http.post("/v1/completions", content=b"{")
        assert bad.status_code == 400
        assert "message" in bad.json()["error"]
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("kind", ["503", "error"])
def test_failures_that_leave_the_connection_open(kind: Any) -> None:
    with running_mock(failures=(Failure(kind, 2),)) as mock, client(mock.url) as http:
        for number in range(1, 5):
            response = http.post("/v1/completions", json=body())
            failed = response.status_code == 503 or "told to fail" in response.text
            assert failed == (number % 2 == 0)
        assert mock.accepted == 1


@pytest.mark.parametrize("kind", ["reset", "truncate"])
def test_failures_that_cut_the_connection(kind: Any) -> None:
    with running_mock(failures=(Failure(kind, 1, 2),)) as mock, client(mock.url) as http:
        with pytest.raises(httpx.TransportError):
            http.post("/v1/completions", json=body())


def test_an_aborted_answer_ends_in_order() -> None:
    with running_mock(failures=(Failure("abort", 1, 2),)) as mock, client(mock.url) as http:
        text = http.post("/v1/completions", json=body()).text
    assert text.count(" token") == 2
    assert '"finish_reason":"abort"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_scripts_parse() -> None:
    assert parse_stalls(["10:0.5", "0:1"]) == (Stall(10, 0.5), Stall(0, 1.0))
    assert parse_failures(["503:10", "reset:7:3"]) == (Failure("503", 10), Failure("reset", 7, 3))


@pytest.mark.parametrize("text", ["", "1", "x:1", "1:x", "-1:1", "1:-1", "1:nan"])
def test_bad_stalls(text: str) -> None:
    with pytest.raises(UserError, match="--stall"):
        parse_stalls([text])


@pytest.mark.parametrize("text", ["", "503", "504:1", "503:0", "503:x", "503:1:-1", "503:1:2:3"])
def test_bad_failures(text: str) -> None:
    with pytest.raises(UserError, match="--fail"):
        parse_failures([text])


@pytest.mark.parametrize(
    "options", [{"ttft_s": -1.0}, {"itl_s": float("nan")}, {"events_per_write": 0}, {"tokens_per_event": 100_000}]
)
def test_bad_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="--"):
        check_options(MockOptions(**options))


def test_an_address_in_use_and_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with running_mock() as mock:
        with pytest.raises(UserError, match="cannot listen"), running_mock(port=int(mock.url.rpartition(":")[2])):
            pass
    with pytest.raises(UserError, match="--log"), running_mock(log=str(tmp_path)):
        pass
