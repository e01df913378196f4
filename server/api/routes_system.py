"""What tells about the server: models, health, version, metrics, start-up times, the OpenAPI document."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from benchctl import __version__
from server.api.body import json_response
from server.api.errors import ApiError, model_not_found
from server.api.openapi import openapi_document
from server.api.responses import HealthResponse, ModelCard, ModelList, VersionResponse
from server.api.state import ApiState, state_of


def _card(state: ApiState) -> ModelCard:
    return ModelCard(
        state.model_name, "model", state.created, "benchctl", state.config.model.model, state.limits.max_model_len
    )


async def models(http: Request) -> Response:
    return json_response(ModelList("list", [_card(state_of(http))]))


async def model(http: Request) -> Response:
    state = state_of(http)
    name = http.path_params["model"]
    if name != state.model_name:
        raise model_not_found(name)
    return json_response(_card(state))


async def health(http: Request) -> Response:
    """200 while the server takes requests, 503 while it drains or when its engine is dead."""
    state_of(http).check_serving()
    return json_response(HealthResponse("ok"))


async def version(http: Request) -> Response:
    state = state_of(http)
    engine = state.engine
    return json_response(
        VersionResponse(
            __version__,
            engine.mode,
            engine.attention_backend,
            engine.device,
            engine.dtype,
            engine.block_size,
            engine.num_blocks,
            engine.max_model_len,
            engine.max_num_batched_tokens,
            state.config.api.api_server_count or 1,
        )
    )


async def metrics(http: Request) -> Response:
    state = state_of(http)
    body, content_type = state.metrics.exposition(state.siblings.others())
    return Response(body, headers={"content-type": content_type})


async def startup(http: Request) -> Response:
    """The phases of this server's start, as the supervisor wrote them down."""
    path = Path(state_of(http).config.runtime_dir) / "startup.json"
    try:
        return Response(path.read_bytes(), media_type="application/json")
    except FileNotFoundError:
        raise ApiError(404, "The start-up report is not written yet; retry.", code="not_ready") from None


async def openapi(http: Request) -> Response:
    return json_response(openapi_document())
