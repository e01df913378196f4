"""Every malformed request gets its 4xx with OpenAI's error body, and the next good one works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.config import ServerConfig
from tests.integration.api_harness import API_KEY, Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = ServerConfig()
    config.api.api_key = API_KEY
    config.api.max_body_bytes = LIMIT
    running = Server(tmp_path_factory.mktemp("run"), config)
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client(headers={"authorization": f"Bearer {API_KEY}"}) as client:
        yield client


def check(answer: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["param"], error["code"]) == (param, code)


def good(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "he"


VALUES: list[tuple[str, Any]] = [
    ("model", 5),
    ("n", 0),
    ("n", 129),
    ("n", 1.5),
    ("n", "2"),
    ("stream", "yes"),
    ("stream", 1),
    ("stop", 3),
    ("stop", [1]),
    ("stop", ""),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.1),
    ("min_p", -0.1),
    ("seed", 1 << 63),
    ("seed", 1.5),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"512": 1}),
    ("logit_bias", {"0" * 20 + "512": 1}),
    ("logit_bias", {"0" * 5000: 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"١": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", [1]),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "1"),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("ignore_eos", 1),
    ("stop_token_ids", [512]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", 1),
    ("priority", 1 << 31),
    ("priority", "high"),
    ("user", 1),
    ("stream_options", {"include_usage": "x"}),
    ("stream_options", {"include_usage": True}),
    ("return_token_ids", 1),
    ("skip_special_tokens", "no"),
]


@pytest.mark.parametrize(("field", "value"), VALUES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bad_values(client: httpx.Client, path: str, field: str, value: Any) -> None:
    content = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    answer = client.post(path, json={"max_tokens": 16, **content, field: value})
    check(answer, 400, field)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "echo": "yes"}, "echo"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": ["x"] * 2048, "n": 128}, "n"),
    ],
)
def test_bad_completions(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    check(client.post(COMPLETIONS, json=body), 400, param)
    good(client)


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [USER], "logprobs": 3}, "logprobs"),
        ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
        (
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_bad_chats(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    check(client.post(CHAT, json=body), 400, param)
    good(client)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "x"',
        b'{"prompt": "x",}',
        b"not json",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x"} {"prompt": "y"}',
        b"\xef\xbb\xbf{}",
        b'{"prompt": "x", "unknown": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b"\x00" * 100,
    ],
)
def test_not_json(client: httpx.Client, body: bytes) -> None:
    check(client.post(COMPLETIONS, content=body), 400, None, "invalid_json")
    good(client)


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"text"'])
def test_json_that_is_no_object(client: httpx.Client, body: bytes) -> None:
    check(client.post(COMPLETIONS, content=body), 400)


def test_number_beyond_float(client: httpx.Client) -> None:
    check(client.post(COMPLETIONS, content=b'{"prompt": "x", "temperature": 1e999}'), 400, "temperature")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_unknown_model(client: httpx.Client, path: str) -> None:
    body = {"model": "../etc/passwd", "prompt": "x", "messages": [USER]}
    check(client.post(path, json=body), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * 4096}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 900_000}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 4096}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 4096}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 4096}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 900_000}]}, "messages"),
        (CHAT, {"messages": [USER], "max_tokens": 4096}, "messages"),
    ],
)
def test_too_long_for_the_context(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = client.post(path, json=body)
    check(answer, 400, param, "context_length_exceeded")
    assert "This model's maximum context length is 4096 tokens" in answer.text
    good(client)


def test_body_of_100_megabytes(client: httpx.Client) -> None:
    body = b'{"prompt": "' + b"x" * 100_000_000 + b'"}'
    check(client.post(COMPLETIONS, content=body), 413, None, "request_too_large")
    good(client)


def test_chunked_body_that_is_too_large(client: httpx.Client) -> None:
    check(client.post(COMPLETIONS, content=iter([b"x" * 65536] * 64)), 413, None, "request_too_large")
    good(client)


def test_content_length_that_lies(server: Server) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n".encode()
    with server.raw() as connection:
        connection.sendall(head + b"content-length: 99999999999999999999999\r\n\r\n")
        assert connection.recv(65536).split(b"\r\n")[0].split()[1][:1] == b"4"
    with server.raw() as connection:
        connection.sendall(head + b"content-length: -5\r\n\r\n")
        assert b" 400 " in connection.recv(65536).split(b"\r\n")[0]


def test_not_http_at_all(server: Server, client: httpx.Client) -> None:
    with server.raw() as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert b" 400 " in connection.recv(65536).split(b"\r\n")[0]
    good(client)


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/health/", "/v1/completions/", "/v1/embeddings", "/v1/models/other", "/metrics/../v1/nothing"]
)
def test_unknown_routes(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404
    assert set(client.get(path).json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", COMPLETIONS), ("DELETE", CHAT), ("POST", "/v1/models"), ("PUT", "/tokenize")]
)
def test_wrong_method(client: httpx.Client, method: str, path: str) -> None:
    answer = client.request(method, path)
    check(answer, 405, None, "method_not_allowed")
    assert "allow" in answer.headers


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_bad_tokenize(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    check(client.post(path, json=body), 400, param)


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", f"Basic {API_KEY}", f"Bearer {API_KEY}x", API_KEY])
def test_wrong_key(server: Server, header: str | None) -> None:
    with server.client(headers={"authorization": header} if header is not None else {}) as client:
        for path in (COMPLETIONS, CHAT):
            answer = client.post(path, content=json.dumps({"prompt": "x"}))
            check(answer, 401, None, "invalid_api_key")
        assert client.get("/metrics").status_code == 401
        assert client.get("/health").status_code == 200


def test_scheme_of_the_key_is_case_insensitive(server: Server) -> None:
    with server.client(headers={"authorization": f"bearer {API_KEY}"}) as client:
        good(client)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server that takes bodies of the default size."""
    running = Server(tmp_path_factory.mktemp("roomy"))
    with running.client() as client:
        yield client
    running.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b'{"prompt": [' + b",".join([b"[1]"] * 70_000) + b"]}"),
        (COMPLETIONS, b'{"prompt": [' + b",".join([b"1"] * (1 << 20)) + b", 1]}"),
        (CHAT, b'{"messages": [], "chat_template_kwargs": {"a": [' + b",".join([b"[]"] * 5_000_000) + b"]}}"),
        (CHAT, b'{"messages": [], "x": [' + b",".join([b"1"] * 140_000) + b"]}"),
        ("/tokenize", b'{"messages": [], "chat_template_kwargs": {"a": [' + b",".join([b"1"] * 140_000) + b"]}}"),
        ("/detokenize", b'{"tokens": [' + b",".join([b"1"] * 140_000) + b"]}"),
    ],
)
def test_bodies_of_too_many_values(roomy: httpx.Client, path: str, body: bytes) -> None:
    answer = roomy.post(path, content=body)
    check(answer, 400, None, "too_many_values")
    assert " are allowed" in answer.text
    good(roomy)


@pytest.mark.parametrize("text", ["a" * ((1 << 19) + 1), ",[{" * (5 << 20)])
def test_texts_that_are_too_long_to_be_tokenized(roomy: httpx.Client, text: str) -> None:
    """A text is not mistaken for values either."""
    for path, body, param in (
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
        (COMPLETIONS, {"prompt": text}, "prompt"),
    ):
        answer = roomy.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded" or param == "messages"
        assert answer.json()["error"]["param"] == param
    good(roomy)


def test_strings_of_too_many_tokens(roomy: httpx.Client) -> None:
    text = "a" * (1 << 16)
    answer = roomy.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    assert answer.json()["token_strs"] == ["a"] * (1 << 16)
    answer = roomy.post("/tokenize", json={"prompt": text + "b", "return_token_strs": True})
    check(answer, 400, "return_token_strs")
    assert "at most 65536 tokens, got 65537" in answer.text
    assert roomy.post("/tokenize", json={"prompt": text + "b"}).json()["count"] == 65537


def test_more_biases_than_tokens(roomy: httpx.Client) -> None:
    """Padded with zeros, an id has many names."""
    biases = {"0" * zeros + str(token): 1 for zeros in range(2) for token in range(10, 512)}
    check(roomy.post(COMPLETIONS, json={"prompt": "x", "logit_bias": biases}), 400, "logit_bias")
