"""Reading request bodies: bounded in size and time, decoded to a typed request."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.errors import ApiError, from_decode_error
from server.api.exchange import Exchange

T = TypeVar("T")
BODY_TIMEOUT_S = 60.0
"""How long a client may take to send the body of a request."""
_JSON = "application/json"


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body of the request is larger than {limit} bytes.", code="request_too_large")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError 413 beyond `limit` bytes, as soon as that is known, and 408 when it stalls.

    What a client goes on sending after the answer is read and thrown away by the server, so that it sees the answer.
    """
    exchange: Exchange = request.scope["state"]["exchange"]
    if (body := exchange.take_body()) is not None:
        if len(body) > limit:
            raise _too_large(limit)
        return body
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"The body of the request did not arrive within {BODY_TIMEOUT_S:g} s.") from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_json(request: Request, decoder: msgspec.json.Decoder[T], limit: int) -> T:
    """The body as the decoder's type. Raises ApiError: as `read_body`, and 400 for anything that is not that type."""
    return decode_json(await read_body(request, limit), decoder)


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises ApiError 400 for anything that is not JSON of the decoder's type."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise from_decode_error(error) from None


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type=_JSON)


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, media_type=_JSON)
