"""ZMQ PUSH/PULL ends that send and receive typed msgspec messages."""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar, overload

import msgspec
import zmq

T = TypeVar("T")


def endpoint(runtime_dir: str, name: str) -> str:
    """`ipc://` address of socket `name` in the server's runtime directory."""
    return "ipc://" + os.path.join(runtime_dir, name + ".sock")


def _configure(socket: zmq.Socket[Any]) -> None:
    # Without a high-water mark a burst of requests is queued, never dropped or blocked on; the API's queue bound
    # is what limits memory. LINGER 0: a dead peer must not hold up our exit.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)


class Sender(Generic[T]):
    """Blocking PUSH end (never blocks in practice: there is no high-water mark)."""

    def __init__(self, context: zmq.Context[Any], address: str, *, bind: bool) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        _configure(self.socket)
        if bind:
            self.socket.bind(address)
        else:
            self.socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: T) -> None:
        self.socket.send(self._encoder.encode(message), copy=True)

    def close(self) -> None:
        self.socket.close(linger=0)


class Receiver(Generic[T]):
    """Blocking PULL end that decodes to `message_type`."""

    def __init__(self, context: zmq.Context[Any], address: str, message_type: Any, *, bind: bool) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        _configure(self.socket)
        if bind:
            self.socket.bind(address)
        else:
            self.socket.connect(address)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)

    @overload
    def receive(self) -> T: ...

    @overload
    def receive(self, timeout_ms: int) -> T | None: ...

    def receive(self, timeout_ms: int | None = None) -> T | None:
        """Next message; None when `timeout_ms` passes first (None waits for ever, 0 polls).

        Raises msgspec.DecodeError on bytes that are not a message of this direction.
        """
        if timeout_ms is not None and not self.socket.poll(timeout_ms, zmq.POLLIN):
            return None
        return self._decoder.decode(self.socket.recv(copy=True))

    def close(self) -> None:
        self.socket.close(linger=0)
