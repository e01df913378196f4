"""Requests made from the server's own OpenAPI document, valid and not, against a real API process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from server.api.openapi import openapi_document
from tests.fuzz.budget import fuzz
from tests.integration.api_harness import Server

schema = schemathesis.openapi.from_dict(openapi_document())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "startup.json").write_text("{}")  # the supervisor writes it
    running = Server(folder, max_model_len=64)  # a chat without `max_tokens` fills the context
    yield running
    running.close()


@schema.parametrize()
@fuzz(40)
def test_answers_are_what_the_document_says(server: Server, case: schemathesis.Case) -> None:
    """Whatever is asked, the status, type and body of the answer are documented ones, and never a 500."""
    answer = case.call(base_url=server.url, timeout=20)
    wanted = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.negative_data_rejection,
        checks.unsupported_method,
        checks.allow_header_conformance,
    ]
    if not answer.headers["content-type"][0].startswith("text/event-stream"):
        wanted.append(checks.response_schema_conformance)
    case.validate_response(answer, checks=wanted)
    assert server.api.process.poll() is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)


@given(body=st.binary(max_size=300))
@fuzz(60)
def test_any_bytes_are_answered(server: Server, body: bytes) -> None:
    with server.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = client.post(path, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"]


@given(template_kwargs=st.dictionaries(st.text(max_size=10), JSON, max_size=4), tools=st.lists(JSON, max_size=3))
@fuzz(40)
def test_free_form_fields_never_break_the_server(server: Server, template_kwargs: dict[str, Any], tools: Any) -> None:
    import json

    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "chat_template_kwargs": template_kwargs,
        "tools": tools,
    }
    content = json.dumps(body).encode()
    with server.client() as client:
        assert client.post("/v1/chat/completions", content=content).status_code in (200, 400)


_LINES = st.lists(
    st.sampled_from([b"GET / HTTP/1.1", b"host: x", b"content-length: 5", b"transfer-encoding: chunked", b"", b"5"])
    | st.binary(max_size=20),
    max_size=8,
)


@given(lines=_LINES, end=st.sampled_from([b"", b"\r\n", b"\r\n\r\n"]))
@fuzz(60)
def test_any_bytes_instead_of_http(server: Server, lines: list[bytes], end: bytes) -> None:
    with server.raw() as connection:
        connection.sendall(b"\r\n".join(lines) + end)
        connection.shutdown(1)
        while connection.recv(4096):
            pass
    with server.client() as client:
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("name", ["x-request-id", "traceparent", "origin", "host", "authorization"])
def test_nothing_a_client_sends_becomes_a_header(server: Server, name: str) -> None:
    plain = {"prompt": "x", "max_tokens": 1}
    with server.client() as client:
        usual = set(client.post("/v1/completions", json=plain).headers)
        answer = client.post("/v1/completions", json={**plain, "user": "a\r\nset-cookie: b=c"}, headers={name: "evil"})
        wrong = client.get("/v1/models/a%0d%0aset-cookie:%20b=c", headers={name: "evil"})
    assert set(answer.headers) == usual
    assert answer.json()["id"].startswith("cmpl-")
    for headers in (answer.headers, wrong.headers):
        assert "set-cookie" not in headers
        assert all("evil" not in value for value in headers.values())
