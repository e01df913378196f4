"""The ASGI application: routes, authentication, errors."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api import routes_chat, routes_completions, routes_system, routes_tokenize
from server.api.body import error_response
from server.api.errors import ApiError
from server.api.exchange import Exchange
from server.api.state import ApiState

_log = logging.getLogger(__name__)
Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def create_app(state: ApiState) -> Gate:
    app = Starlette(
        routes=[
            Route("/v1/completions", routes_completions.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes_chat.chat_completions, methods=["POST"]),
            Route("/tokenize", routes_tokenize.tokenize, methods=["POST"]),
            Route("/detokenize", routes_tokenize.detokenize, methods=["POST"]),
            Route("/v1/models", routes_system.models),
            Route("/v1/models/{model:path}", routes_system.model),
            Route("/v1/startup", routes_system.startup),
            Route("/health", routes_system.health),
            Route("/version", routes_system.version),
            Route("/metrics", routes_system.metrics),
            Route("/openapi.json", routes_system.openapi),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_client_disconnect,
            Exception: _on_bug,
        },
    )
    # A redirect would repeat the request's own Host header.
    app.router.redirect_slashes = False
    app.state.api = state
    endpoints: dict[str, Endpoint] = {
        "/v1/completions": routes_completions.completions,
        "/v1/chat/completions": routes_chat.chat_completions,
    }
    return Gate(app, state.config.api.api_key, endpoints)


class Gate:
    """Outermost: lets in who has the key (`/health` is open to all), and takes POST requests for `endpoints` there
    itself, since the framework's four layers cost more than all that is done for such a request."""

    def __init__(self, app: ASGIApp, api_key: str | None, endpoints: dict[str, Endpoint]) -> None:
        self.app = app
        self._expected = None if api_key is None else b"bearer " + api_key.encode()
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self._expected is not None and scope["path"] != "/health" and not self._has_key(scope):
                error = ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
                error.headers = {"WWW-Authenticate": "Bearer"}
                await error_response(error)(scope, receive, send)
                return
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is not None and scope["method"] == "POST":
                await self._run(endpoint, scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _run(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """What the framework would do: answer, also when the endpoint raises."""
        scope["app"] = self.app
        request = Request(scope, receive, send)
        answer: ASGIApp
        try:
            try:
                answer = await endpoint(request)
            except ApiError as error:
                answer = await _on_api_error(request, error)
            except ClientDisconnect as error:
                answer = await _on_client_disconnect(request, error)
            await answer(scope, receive, send)
        except Exception as error:
            exchange: Exchange = scope["state"]["exchange"]
            if not exchange.is_started:
                await (await _on_bug(request, error))(scope, receive, send)
            raise

    def _has_key(self, scope: Scope) -> bool:
        assert self._expected is not None
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        given = values[0] if len(values) == 1 else b""
        # The scheme's name is case-insensitive, the key is not.
        return hmac.compare_digest(given[:7].lower() + given[7:], self._expected)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "No such route" if error.status_code == 404 else str(error.detail)
    answer = ApiError(
        error.status_code,
        f"{what}: {request.method} {request.url.path}",
        code="not_found" if error.status_code == 404 else "method_not_allowed" if error.status_code == 405 else None,
        headers=dict(error.headers or {}),
    )
    return error_response(answer)


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_bug(request: Request, error: Exception) -> Response:
    # It is raised again behind this answer, and uvicorn logs it with its traceback.
    return error_response(
        ApiError(500, "The server failed on this request.", type="server_error", code="internal_error")
    )
