"""/v1/completions over real sockets, with a fake engine behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.api_harness import Server, events, words


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("run"))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _default_script(server: Server) -> Iterator[None]:
    yield
    server.engine.script = words
    server.engine.paused.clear()


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "Say hello", **fields})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def stream(server: Server, **fields: Any) -> list[Any]:
    body = {"model": "tiny", "prompt": "Say hello", "stream": True, **fields}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


def test_completion_has_text_and_usage(server: Server) -> None:
    result = complete(server, max_tokens=11)
    [choice] = result["choices"]
    assert choice["text"] == "hello world"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert result["object"] == "text_completion"
    assert result["model"] == "tiny"
    assert result["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 11,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_default_max_tokens_is_16(server: Server) -> None:
    assert complete(server)["usage"]["completion_tokens"] == 16


def test_stream_adds_up_and_ends_with_done(server: Server) -> None:
    chunks = stream(server, max_tokens=11)
    assert chunks.pop() == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_include_usage_sends_one_last_chunk_without_choices(server: Server) -> None:
    chunks = stream(server, max_tokens=5, stream_options={"include_usage": True})
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in chunks)


def test_continuous_usage_counts_up(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, max_tokens=6, stream_options=options)[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
