"""TCP transports that are fair to their neighbours.

uvloop (libuv) reads up to 8 MB from one socket before it looks at the next; when answers arrive faster than they are
parsed, the first token of one stream then waits for thousands of tokens of another, and the load generator measures
itself. Here every socket gets one bounded read per turn, and what is written goes to the kernel at once.

The sockets are in an epoll of our own, which the loop watches as one file. `loop.add_reader` per socket costs more, and
uvloop's calls a reader only once after a reset: data that came before it would hide the reset for ever.
"""

from __future__ import annotations

import asyncio
import select
import socket
from typing import Protocol

READ_BYTES = 8 * 1024
"""Some 40 events of 200 bytes: 64 saturated streams are all looked at within a few milliseconds."""
_BATCH = 16
"""Sockets served before the loop looks at its timer."""


class ByteSink(Protocol):
    """The two callbacks of asyncio.Protocol that a transport needs."""

    def data_received(self, data: bytes) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class SocketPoller:
    """The sockets of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._epoll = select.epoll()
        self._transports: dict[int, SocketTransport] = {}
        loop.add_reader(self._epoll.fileno(), self._serve)

    def close(self) -> None:
        """Close every socket without a word to its sink."""
        self.loop.remove_reader(self._epoll.fileno())
        for transport in self._transports.values():
            transport.discard()
        self._transports.clear()
        self._epoll.close()

    def add(self, fd: int, transport: SocketTransport) -> None:
        self._transports[fd] = transport
        self._epoll.register(fd, select.EPOLLIN)

    def watch_writing(self, fd: int, wanted: bool) -> None:
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, fd: int) -> None:
        del self._transports[fd]
        self._epoll.unregister(fd)

    def _serve(self) -> None:
        for fd, events in self._epoll.poll(0, _BATCH):
            # An earlier one of the batch may have closed it.
            transport = self._transports.get(fd)
            if transport is None:
                continue
            if events != select.EPOLLOUT:
                transport.read_ready()
            if events & select.EPOLLOUT:
                transport.write_ready()


class SocketTransport:
    """A connected, non-blocking TCP socket, with the methods of asyncio.Transport that the load path uses."""

    def __init__(self, poller: SocketPoller, sock: socket.socket, sink: ByteSink) -> None:
        self._poller = poller
        self._sock = sock
        self._sink = sink
        self._unsent = b""
        self._closed = False
        poller.add(sock.fileno(), self)

    def write(self, data: bytes) -> None:
        """Send now what the kernel takes, the rest when it takes more."""
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the reading side hears of it
        if sent < len(data):
            self._unsent = data[sent:]
            self._poller.watch_writing(self._sock.fileno(), True)

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Close at once, unsent bytes are lost; `connection_lost` follows."""
        self._end(None)

    abort = close

    def discard(self) -> None:
        """Close, and tell nobody."""
        self._closed = True
        self._sock.close()

    def read_ready(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            self._sink.data_received(data)
        else:
            self._end(None)

    def write_ready(self) -> None:
        if self._closed:
            return
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""
        if not self._unsent:
            self._poller.watch_writing(self._sock.fileno(), False)

    def _end(self, error: OSError | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._poller.remove(self._sock.fileno())
        self._sock.close()
        self._poller.loop.call_soon(self._sink.connection_lost, error)


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
