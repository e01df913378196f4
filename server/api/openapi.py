"""The OpenAPI document, made from the types that the code decodes and encodes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import msgspec

from benchctl import __version__
from server.api import protocol, responses
from server.api.errors import ErrorBody


class _Operation(NamedTuple):
    method: str
    path: str
    summary: str
    request: type | None
    response: type | str
    """A type for JSON, else a media type."""
    statuses: tuple[int, ...]
    """Errors besides 401."""
    streams: bool = False


_GENERATE = (400, 404, 408, 413, 429, 500, 503)
OPERATIONS = (
    _Operation("post", "/v1/completions", "Complete prompts", protocol.CompletionRequest,
               responses.CompletionResponse, _GENERATE, True),
    _Operation("post", "/v1/chat/completions", "Answer a conversation", protocol.ChatCompletionRequest,
               responses.ChatCompletionResponse, _GENERATE, True),
    _Operation("post", "/tokenize", "Token ids of a text or conversation", protocol.TokenizeRequest,
               responses.TokenizeResponse, (400, 404, 408, 413, 429, 503)),
    _Operation("post", "/detokenize", "Text of token ids", protocol.DetokenizeRequest,
               responses.DetokenizeResponse, (400, 404, 408, 413, 503)),
    _Operation("get", "/v1/models", "The served model", None, responses.ModelList, ()),
    _Operation("get", "/v1/models/{model}", "One model", None, responses.ModelCard, (404,)),
    _Operation("get", "/health", "Whether requests are taken", None, responses.HealthResponse, (503,)),
    _Operation("get", "/version", "Version of the server", None, responses.VersionResponse, ()),
    _Operation("get", "/metrics", "Prometheus metrics", None, "text/plain", ()),
    _Operation("get", "/v1/startup", "Phases of the server's start", None, "application/json", (404,)),
    _Operation("get", "/openapi.json", "This document", None, "application/json", ()),
)  # fmt: skip


@functools.cache
def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1 of every route."""
    types = [t for o in OPERATIONS for t in (o.request, o.response) if isinstance(t, type)]
    schemas, components = msgspec.json.schema_components(
        [*types, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip([*types, ErrorBody], schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "benchctl server", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(operation: _Operation, schema_of: dict[type, dict[str, Any]]) -> dict[str, Any]:
    response = operation.response
    content: dict[str, Any] = (
        {"application/json": {"schema": schema_of[response]}} if isinstance(response, type) else {response: {}}
    )
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": schema_of[ErrorBody]}}
    statuses = operation.statuses if operation.path == "/health" else (401, *operation.statuses)
    described: dict[str, Any] = {
        "operationId": operation.path.strip("/").replace("/", "_").replace("{", "").replace("}", ""),
        "summary": operation.summary,
        "security": [] if operation.path == "/health" else [{}, {"api_key": []}],
        "responses": {
            "200": {"description": "Success", "content": content},
            **{str(status): {"description": "Error", "content": error} for status in statuses},
        },
    }
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[operation.request]}},
        }
    if "{model}" in operation.path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described
