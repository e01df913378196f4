"""A TCP transport that is fair to its neighbours.

uvloop (libuv) reads up to 8 MB from one socket before it looks at the next; when answers arrive faster than they are
parsed, the first token of one stream then waits for thousands of tokens of another, and the load generator measures
itself. Here every socket gets one bounded read per turn of the loop, and what is written goes to the kernel at once.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

READ_BYTES = 8 * 1024
"""Some 40 events of 200 bytes: 64 saturated streams are all looked at within a few milliseconds."""


class ByteSink(Protocol):
    """The two callbacks of asyncio.Protocol that a transport needs."""

    def data_received(self, data: bytes) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class SocketTransport:
    """A connected, non-blocking TCP socket, with the methods of asyncio.Transport that the load path uses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, sink: ByteSink) -> None:
        self._loop = loop
        self._sock = sock
        self._sink = sink
        self._unsent = b""
        self._closed = False
        loop.add_reader(sock, self._read)

    def write(self, data: bytes) -> None:
        """Send now what the kernel takes, the rest when it takes more."""
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return  # the reading side hears of it
        if sent < len(data):
            self._unsent = data[sent:]
            self._loop.add_writer(self._sock, self._write_more)

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def close(self) -> None:
        """Close at once, unsent bytes are lost; `connection_lost` follows."""
        self._end(None)

    abort = close

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            self._sink.data_received(data)
        else:
            self._end(None)

    def _write_more(self) -> None:
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._unsent = b""
        if not self._unsent:
            self._loop.remove_writer(self._sock)

    def _end(self, error: OSError | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._loop.call_soon(self._sink.connection_lost, error)


async def open_socket(
    loop: asyncio.AbstractEventLoop, family: socket.AddressFamily, address: tuple[object, ...]
) -> socket.socket:
    """A connected socket without Nagle's delay. Raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
