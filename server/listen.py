"""Binding the HTTP port before anything slow happens."""

from __future__ import annotations

import errno
import socket

from server.errors import UserError


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound, inheritable, not yet listening TCP socket.

    Clients get "connection refused" until an API process listens on it. A port on which somebody listens is found
    taken here, at once; two servers that start on one port at the same time both bind it (Linux allows that with
    SO_REUSEADDR, without which a restart would have to wait for TIME_WAIT), and the later one fails when it listens.
    Raises UserError when the address is taken, not ours or not to be resolved.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"--host {host!r}: cannot be resolved ({error}); use an address of this machine") from error
    except OverflowError as error:
        raise UserError(f"--port {port}: must be from 0 to 65535") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is taken; stop its owner or choose another --port (0: any)"
            ) from error
        raise UserError(f"cannot bind {host}:{port}: {error.strerror}; choose another --host or --port") from error
    sock.set_inheritable(True)
    return sock
