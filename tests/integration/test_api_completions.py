"""/v1/completions over real sockets, with a fake engine behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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


def test_prompts_of_every_form(server: Server) -> None:
    for prompt, counts in [
        ("ab", [2]),
        (["ab", "cde"], [2, 3]),
        ([97, 98, 99], [3]),
        ([[97], [98, 99]], [1, 2]),
    ]:
        before = len(server.engine.requests)
        result = complete(server, prompt=prompt, max_tokens=2)
        assert [choice["index"] for choice in result["choices"]] == list(range(len(counts)))
        assert [len(request.prompt_token_ids) for request in server.engine.requests[before:]] == counts
        assert result["usage"]["prompt_tokens"] == sum(counts)


def test_n_choices_of_each_prompt(server: Server) -> None:
    before = len(server.engine.requests)
    result = complete(server, prompt=["a", "b"], n=3, seed=7, max_tokens=2, priority=5)
    assert [choice["index"] for choice in result["choices"]] == list(range(6))
    assert result["usage"]["prompt_tokens"] == 2
    assert result["usage"]["completion_tokens"] == 12
    sent = server.engine.requests[before:]
    assert [request.sampling.seed for request in sent] == [7, 8, 9, 7, 8, 9]
    assert {request.priority for request in sent} == {5}
    assert len({request.request_id for request in sent}) == 6


def test_streamed_choices_are_told_apart(server: Server) -> None:
    server.engine.script = lambda request: iter(f"{request.request_id[-1]} text ".encode() * 9)
    chunks = stream(server, n=2, max_tokens=7)[:-1]
    for index in (0, 1):
        pieces = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(pieces) == f"{index} text "


def test_echo_puts_the_prompt_first(server: Server) -> None:
    assert complete(server, prompt="Say ", echo=True, max_tokens=5)["choices"][0]["text"] == "Say hello"
    assert complete(server, prompt=[83, 97], echo=True, max_tokens=5)["choices"][0]["text"] == "Sahello"
    chunks = stream(server, prompt="Say ", echo=True, max_tokens=5)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Say hello"


def test_echo_with_max_tokens_0_only_scores_the_prompt(server: Server) -> None:
    result = complete(server, prompt="abc", echo=True, logprobs=1, max_tokens=0)
    [choice] = result["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert result["usage"]["completion_tokens"] == 0


def test_logprobs(server: Server) -> None:
    [choice] = complete(server, max_tokens=2, logprobs=2)["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["h", "e"],
        "top_logprobs": [{"h": -0.5, "i": -1.0, "j": -2.0}, {"e": -0.5, "f": -1.0, "g": -2.0}],
    }


def test_streamed_logprobs_are_those_of_the_whole(server: Server) -> None:
    fields: dict[str, Any] = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 6}
    whole = complete(server, **fields)["choices"][0]["logprobs"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in stream(server, **fields)[:-1]]
    for key in whole:
        assert [value for chunk in chunks for value in chunk[key]] == whole[key]


def test_stop_string_across_tokens(server: Server) -> None:
    for streaming in (False, True):
        fields: dict[str, Any] = {"stop": ["wor", "zzz"], "max_tokens": 100}
        if streaming:
            choices = [chunk["choices"][0] for chunk in stream(server, **fields)[:-1]]
        else:
            choices = complete(server, **fields)["choices"]
        assert "".join(choice["text"] for choice in choices) == "hello "
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == "wor"
    server.wait_for(lambda: server.engine.requests[-1].request_id in server.engine.aborted)


def test_stop_string_can_be_part_of_the_output(server: Server) -> None:
    [choice] = complete(server, stop="wor", include_stop_str_in_output=True, max_tokens=100)["choices"]
    assert choice["text"] == "hello wor"


def test_min_tokens_hold_stop_strings_off(server: Server) -> None:
    [choice] = complete(server, stop="lo", min_tokens=6, max_tokens=100)["choices"]
    assert choice["text"] == "hello world, hel"


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hello ")])
def test_stop_token_is_shown_only_on_request(server: Server, include: bool, text: str) -> None:
    [choice] = complete(server, stop_token_ids=[32], max_tokens=50, include_stop_str_in_output=include)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", 32)


def test_end_token_stops_and_ignore_eos_goes_on(server: Server) -> None:
    server.engine.script = lambda request: iter([104, 105, 257, 104, 105])
    result = complete(server, max_tokens=5)
    assert result["choices"][0]["text"] == "hi"
    assert (result["choices"][0]["finish_reason"], result["choices"][0]["stop_reason"]) == ("stop", None)
    assert result["usage"]["completion_tokens"] == 3
    [choice] = complete(server, max_tokens=5, ignore_eos=True)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hihi", "length")
    [choice] = complete(server, max_tokens=5, ignore_eos=True, skip_special_tokens=False)["choices"]
    assert choice["text"] == "hi<|special_257|>hi"


def test_characters_are_streamed_whole_and_a_cut_one_is_marked(server: Server) -> None:
    server.engine.script = lambda request: iter("é你🙂".encode())
    chunks = [chunk["choices"][0]["text"] for chunk in stream(server, max_tokens=9)[:-1]]
    assert "".join(chunks) == "é你🙂"
    assert all(text in ("", "é", "你", "🙂") or len(text) > 1 for text in chunks)
    [choice] = complete(server, max_tokens=8)["choices"]
    assert choice["text"] == "é你\ufffd"


def test_token_ids_on_request(server: Server) -> None:
    [choice] = complete(server, prompt="ab", return_token_ids=True, max_tokens=3)["choices"]
    assert choice["token_ids"] == list(b"hel")
    assert choice["prompt_token_ids"] == list(b"ab")
    chunks = [chunk["choices"][0] for chunk in stream(server, return_token_ids=True, max_tokens=3)[:-1]]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == list(b"hel")
    assert [chunk.get("prompt_token_ids") for chunk in chunks].count(list(b"Say hello")) == 1


def test_unknown_fields_are_ignored_and_known_ones_accepted(server: Server) -> None:
    complete(server, user="me", best_of=1, made_up={"x": [1]}, logit_bias={"5": 1}, model=None)


def test_context_is_filled_to_the_last_token(server: Server) -> None:
    prompt = [65] * 4094
    result = complete(server, prompt=prompt, max_tokens=2)
    assert result["usage"]["total_tokens"] == 4096


def test_system_routes(server: Server) -> None:
    with server.client() as client:
        [card] = client.get("/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 4096)
        assert client.get("/v1/models/tiny").json() == card
        assert client.get("/v1/models/other").status_code == 404
        assert client.get("/health").json() == {"status": "ok"}
        version = client.get("/version").json()
        assert version["version"]
        assert {"mode", "attention_backend", "device", "dtype", "block_size", "num_blocks"} <= version.keys()
        assert client.get("/openapi.json").json()["openapi"].startswith("3.1")
        assert client.get("/v1/startup").status_code == 404
        report = '{"exec_ns": 1}'
        (Path(server.config.runtime_dir) / "startup.json").write_text(report)
        assert client.get("/v1/startup").text == report
        metrics = client.get("/metrics").text
        assert 'benchctl:request_success_total{finished_reason="length",model_name="tiny"}' in metrics
        assert 'benchctl:inter_token_latency_seconds_bucket{le="+Inf",model_name="tiny"}' in metrics


def test_tokenize_and_back(server: Server) -> None:
    with server.client() as client:
        tokens = client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
        assert tokens == {"count": 3, "max_model_len": 4096, "tokens": [104, 195, 169], "token_strs": ["h", "Ã", "©"]}
        assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "hé"}
        chat = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
        ids = client.post("/tokenize", json=chat).json()["tokens"]
        assert bytes(ids).decode() == "<|im_start|>user\nhi<|im_end|>\n"


def test_requests_can_be_pipelined(server: Server) -> None:
    body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with server.raw() as connection:
        connection.sendall(request * 3)
        received = b""
        while received.count(b"[DONE]") < 3:
            data = connection.recv(65536)
            assert data
            received += data
    assert received.count(b"HTTP/1.1 200 OK") == 3


def test_log_probabilities_of_many_positions(server: Server) -> None:
    """They are written elsewhere; the answer is the same, whole or streamed."""
    prompt = [[65 + place % 26 for place in range(300)], [97] * 300]
    asked = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 2}
    with server.client() as client:
        whole = client.post("/v1/completions", json=asked).json()
        chunks = events(client.post("/v1/completions", json={**asked, "stream": True}).text)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "logprobs": True, "top_logprobs": 2}
        [answer] = client.post("/v1/chat/completions", json=chat).json()["choices"]
    assert chunks.pop() == "[DONE]"
    for index in range(2):
        choice = whole["choices"][index]
        assert choice["index"] == index
        assert choice["text"] == "".join(map(chr, prompt[index])) + "he"
        streamed = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in streamed) == choice["text"]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert len(choice["logprobs"][name]) == 302
            assert [entry for part in streamed for entry in part["logprobs"][name]] == choice["logprobs"][name]
    assert [entry["token"] for entry in answer["logprobs"]["content"]] == list(("hello world, " * 24)[:300])
    assert answer["finish_reason"] == "length"
