"""The published document is true to the routes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

from starlette.applications import Starlette
from starlette.routing import Route

from server.api.app import create_app
from server.api.openapi import openapi_document
from server.api.state import ApiState
from server.config import ServerConfig


class _State:
    config = ServerConfig()


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


def test_document_names_exactly_the_routes() -> None:
    app = cast(Starlette, create_app(cast(ApiState, _State())).app)
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    document = openapi_document()
    assert {(path, method) for path, item in document["paths"].items() for method in item} == routes


def test_every_reference_resolves() -> None:
    document = openapi_document()
    names = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert names <= set(document["components"]["schemas"])


def test_schema_says_what_is_required_and_nullable() -> None:
    schema = openapi_document()["components"]["schemas"]["CompletionRequest"]
    assert schema["required"] == ["prompt"]
    assert {"type": "null"} in schema["properties"]["temperature"]["anyOf"]


def test_api_process_imports_no_torch() -> None:
    code = "import server.api.lifecycle, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
