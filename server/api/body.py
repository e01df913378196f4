"""Reading request bodies: bounded in size, time, memory and number of values, decoded to a typed request."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.errors import ApiError, from_decode_error, invalid, too_much_received
from server.api.exchange import Exchange

T = TypeVar("T")
BODY_TIMEOUT_S = 60.0
"""How long a client may take to send the body of a request."""
RECEIVED_BYTES = 256 << 20
"""Bodies that one process holds while they arrive or wait to be decoded, all together."""
UNCOUNTED_BYTES = 64 << 10
"""What of every body does not count: other clients' large bodies must not turn ordinary requests away. As much is in
the buffers of a connection anyway."""
DECODED_BYTES = 256 << 20
"""What requests that are not in the engine yet may take together once they are decoded, estimated."""
MAX_CONTAINERS = 1 << 16
"""Lists and objects of a body. They cost most to decode: the smallest one takes thirty times its own size."""
MAX_VALUES = 1 << 17
"""Values of any kind in a body: some 20 ms on the event loop."""
# Taking more out of a body would take longer than decoding it. No request has a use for as many.
_MAX_STRINGS = 1 << 18
# Bodies that nobody waits for memory for: decoded they take little more than a connection.
_SMALL_BYTES = 4 << 10
_JSON = "application/json"
_STRING = re.compile(rb'"[^"]*"')
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'",[{'))


class Memory:
    """Shares out a number of bytes, in order of arrival. Used in the event loop only."""

    def __init__(self, total: int) -> None:
        self._total = self.free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, size: int) -> bool:
        """Take `size` bytes now; False: they are not free, or others wait."""
        if size > self.free or self._waiting:
            return False
        self.free -= size
        return True

    async def wait(self, size: int) -> int:
        """Take `size` bytes, or all that there are, as soon as they are free; returns how many."""
        size = min(size, self._total)
        if not self.take(size):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    self._hand_on()
                else:
                    self.give(size)
                raise
        return size

    def give(self, size: int) -> None:
        self.free += size
        self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if size > self.free:
                    return
                self.free -= size
                turn.set_result(None)
            self._waiting.popleft()


class Lease:
    """Memory of one request, from its body's first byte until it is prepared; given back at the end of a `with`."""

    __slots__ = ("_decoded", "_preparing", "_received", "_receiving")

    def __init__(self, receiving: Memory, preparing: Memory) -> None:
        self._receiving = receiving
        self._preparing = preparing
        self._received = 0
        self._decoded = 0

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end_receiving()
        if self._decoded:
            self._preparing.give(self._decoded)
            self._decoded = 0

    def receive(self, size: int) -> None:
        """`size` bytes of the body are here. Raises ApiError 503 when that is more than there is memory for."""
        more = size - UNCOUNTED_BYTES - self._received
        if more > 0:
            if not self._receiving.take(more):
                raise too_much_received(RECEIVED_BYTES)
            self._received += more

    def end_receiving(self) -> None:
        """The body as it came is dropped."""
        if self._received:
            self._receiving.give(self._received)
            self._received = 0

    async def decode(self, size: int) -> None:
        """Wait until there is memory for what a body of `size` bytes is decoded to."""
        if size > _SMALL_BYTES:
            # Text takes up to four bytes a character; see `MAX_CONTAINERS` for the rest.
            self._decoded = await self._preparing.wait(min(32 * size, 4 * size + (32 << 20)))


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body of the request is larger than {limit} bytes.", code="request_too_large")


async def read_body(request: Request, limit: int, lease: Lease) -> bytes | bytearray:
    """The whole body. Raises ApiError 413 beyond `limit` bytes, as soon as that is known, 408 when it stalls, and 503
    when others' bodies leave no memory for it.

    What a client goes on sending after the answer is read and thrown away by the server, so that it sees the answer.
    """
    exchange: Exchange = request.scope["state"]["exchange"]
    if (whole := exchange.take_body()) is not None:
        if len(whole) > limit:
            raise _too_large(limit)
        lease.receive(len(whole))
        return whole
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise _too_large(limit)
                lease.receive(len(body) + len(chunk))
                body += chunk
    except TimeoutError:
        raise ApiError(408, f"The body of the request did not arrive within {BODY_TIMEOUT_S:g} s.") from None
    return body


async def read_json(
    request: Request, decoder: msgspec.json.Decoder[T], limit: int, lease: Lease, max_values: int = MAX_VALUES
) -> T:
    """The body as the decoder's type. Raises ApiError: as `read_body`, and 400 for anything that is not that type."""
    body = await read_body(request, limit, lease)
    await lease.decode(len(body))
    return decode_json(body, decoder, lease, max_values)


def decode_json(
    body: bytes | bytearray, decoder: msgspec.json.Decoder[T], lease: Lease, max_values: int = MAX_VALUES
) -> T:
    """Ends the receiving of `lease`. Raises ApiError 400 for anything that is not JSON of the decoder's type, and,
    before it is decoded, for JSON of more than `max_values` values or `MAX_CONTAINERS` lists and objects."""
    try:
        if len(body) > MAX_CONTAINERS:
            _check_values(body, max_values)
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise from_decode_error(error) from None
    finally:
        lease.end_receiving()


def _check_values(body: bytes | bytearray, max_values: int) -> None:
    # At most: text can hold these characters as well.
    containers = body.count(b"[") + body.count(b"{")
    if containers <= MAX_CONTAINERS and containers + body.count(b",") <= max_values:
        return
    # Exactly, as far as the body is JSON: what follows an error is not decoded.
    structure: bytes | bytearray = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_STRUCTURE)
    if structure.count(b'"') <= 2 * _MAX_STRINGS:
        structure = _STRING.sub(b"", structure)
        containers = structure.count(b"[") + structure.count(b"{")
        if containers <= MAX_CONTAINERS and containers + structure.count(b",") <= max_values:
            return
    raise invalid(
        f"The body of the request holds too many values: at most {max_values} are allowed, and {MAX_CONTAINERS} lists "
        f"and objects. Please send several smaller requests.",
        code="too_many_values",
    )


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return raw_json_response(msgspec.json.encode(content), status, headers)


def raw_json_response(content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(content, status, headers, media_type=_JSON)


def error_response(error: ApiError) -> Response:
    return raw_json_response(error.body(), error.status, error.headers)
