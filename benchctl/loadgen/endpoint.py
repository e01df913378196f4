"""Where requests go, and what they look like on the wire."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from benchctl.loadgen.connection import Connection
from benchctl.loadgen.transport import SocketPoller, SocketTransport, open_socket
from server.errors import UserError
from workloads.base import Message, WorkloadRequest

EndpointName = Literal["completions", "chat"]
_PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Endpoint(msgspec.Struct, frozen=True):
    """An endpoint's address, taken apart."""

    host: str
    port: int
    tls: bool
    path: str
    authority: str
    """Value of the Host header."""


def parse_endpoint(url: str, endpoint: EndpointName) -> Endpoint:
    """The endpoint below a base URL, with or without `/v1` at its end. Raises UserError for what is not one."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise UserError(f"--url {url}: {error}") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or not url.isprintable() or " " in url:
        raise UserError(f"--url {url}: expected http://HOST:PORT or https://HOST")
    if parts.username is not None:
        raise UserError("--url: a user name in the URL is not supported; use --api-key")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    default = _DEFAULT_PORTS[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Endpoint(
        host=parts.hostname,
        port=default if port is None else port,
        tls=parts.scheme == "https",
        path=prefix + _PATHS[endpoint],
        authority=host if port in (None, default) else f"{host}:{port}",
    )


class RequestEncoder:
    """Workload requests as HTTP messages.

    `temperature` is 0 unless the request says otherwise; `ignore_eos` goes with requests of forced length when
    `force_lengths` is set; a final usage is always asked for, and one per event if `continuous_usage`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        model: str,
        chat: bool,
        api_key: str | None,
        force_lengths: bool,
        continuous_usage: bool,
    ) -> None:
        self._model = model
        self._chat = chat
        self._force_lengths = force_lengths
        self._stream_options = {"include_usage": True}
        if continuous_usage:
            self._stream_options["continuous_usage_stats"] = True
        lines = [
            f"POST {endpoint.path} HTTP/1.1",
            f"Host: {endpoint.authority}",
            "User-Agent: benchctl",
            "Accept: text/event-stream",
            "Content-Type: application/json",
        ]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        self._head = "\r\n".join([*lines, "X-Request-Id: "]).encode("latin-1")

    def encode(self, request: WorkloadRequest, history: Sequence[Message] = ()) -> bytes:
        """Head and body. `history` goes before the messages of a request with `append_reply`."""
        body: dict[str, Any] = {"model": self._model}
        if self._chat:
            body["messages"] = [*history, *as_messages(request)]
        elif request.prompt_token_ids is not None:
            body["prompt"] = request.prompt_token_ids
        else:
            body["prompt"] = as_text(request, history)
        body["max_tokens"] = request.max_tokens
        body["temperature"] = 0.0
        body["stream"] = True
        body["stream_options"] = self._stream_options
        if request.ignore_eos and self._force_lengths:
            body["ignore_eos"] = True
        body.update(request.extra_body)
        data = msgspec.json.encode(body)
        return b"%b%d\r\nContent-Length: %d\r\n\r\n%b" % (self._head, request.index, len(data), data)


def as_messages(request: WorkloadRequest) -> list[Message]:
    """The request's own messages; a text prompt is one message of the user."""
    if request.messages is not None:
        return request.messages
    if request.prompt is None:
        raise UserError(
            "prompts of token ids cannot go to the chat endpoint; use --endpoint completions or text prompts"
        )
    return [Message("user", request.prompt)]


def as_text(request: WorkloadRequest, history: Sequence[Message] = ()) -> str:
    """The request as a text prompt; messages are joined by blank lines, as the completions endpoint has no template."""
    if request.prompt is not None:
        return request.prompt
    return "\n\n".join(message.content for message in (*history, *as_messages(request)))


def explain_refusal(error: OSError, timeout_s: float) -> str:
    """Why no connection came about; `timeout_s` is the most that it was waited for."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"no connection within {timeout_s:g} s"
    return os.strerror(error.errno) if error.errno is not None and error.errno > 1 else str(error)


class Connector:
    """Opens connections to one endpoint; names are looked up once."""

    def __init__(
        self,
        endpoint: Endpoint,
        poller: SocketPoller,
        factory: Callable[[], Connection],
        timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._poller = poller
        self._loop = poller.loop
        self._factory = factory
        self._timeout_s = timeout_s
        self._ssl = ssl.create_default_context() if endpoint.tls else None
        self._addresses: list[tuple[socket.AddressFamily, tuple[object, ...]]] = []

    async def connect(self) -> Connection:
        """A connection, from the first address that takes it. Raises OSError (TimeoutError among them)."""
        if not self._addresses:
            found = await self._loop.getaddrinfo(self._endpoint.host, self._endpoint.port, type=socket.SOCK_STREAM)
            self._addresses = list(dict.fromkeys((entry[0], entry[4]) for entry in found))
        errors: list[OSError] = []
        for choice in list(self._addresses):
            try:
                async with asyncio.timeout(self._timeout_s):
                    connection = await self._connect_to(*choice)
            except OSError as error:
                errors.append(error)
                continue
            if self._addresses[0] != choice:
                self._addresses.remove(choice)
                self._addresses.insert(0, choice)
            return connection
        raise errors[0]

    async def _connect_to(self, family: socket.AddressFamily, address: tuple[object, ...]) -> Connection:
        sock = await open_socket(self._loop, family, address)
        connection = self._factory()
        if self._ssl is None:
            connection.connection_made(SocketTransport(self._poller, sock, connection))
            return connection
        try:
            await self._loop.create_connection(
                lambda: connection, sock=sock, ssl=self._ssl, server_hostname=self._endpoint.host
            )
        except BaseException:
            sock.close()
            raise
        return connection
