"""The connections of one worker: as many as flights need, opened before they need them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from benchctl.loadgen.connection import Connection, Flight
from benchctl.loadgen.endpoint import Connector

MOST_CONNECTING = 256


class PoolUser(Protocol):
    """Hears what the pool has for it."""

    def send(self, flight: Flight, connection: Connection) -> None:
        """Here is the connection for a flight that was given to `take`."""

    def connect_failed(self, flight: Flight | None, error: OSError) -> None:
        """An attempt failed, and with it a flight that waited; None: it was for a spare connection."""


class ConnectionPool:
    """Idle connections, and flights that wait for one."""

    def __init__(self, user: PoolUser, connector: Connector) -> None:
        self.refused = 0
        """Attempts that failed since the last that did not."""
        self.last_contact_ns = time.monotonic_ns()
        """When a connection was last made."""
        self._user = user
        self._connector = connector
        self._idle: list[Connection] = []
        self._waiting: deque[Flight] = deque()
        self._connecting = 0
        self._spare = 0
        """Connections wanted beyond those that flights wait for."""
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, flight: Flight) -> None:
        """Send `flight` over an idle connection, or over the next that is idle."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                self._user.send(flight, connection)
                return
        self._waiting.append(flight)
        self._spare = max(0, self._spare - 1)  # the connection that was wanted for it is now waited for
        self.connect_as_needed()

    def reserve(self, wanted: int) -> None:
        """See that so many connections are idle, or will be."""
        self._spare = max(0, wanted - len(self._idle))
        self.connect_as_needed()

    def give(self, connection: Connection) -> None:
        """The connection is idle."""
        if self._waiting:
            self._user.send(self._waiting.popleft(), connection)
        else:
            self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        """The connection is closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def connect_as_needed(self) -> None:
        """One attempt for each flight that waits and each spare connection; the most at once is bounded."""
        while self._connecting < min(MOST_CONNECTING, len(self._waiting) + self._spare):
            self._connecting += 1
            task = asyncio.ensure_future(self._connect())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def take_waiting(self) -> list[Flight]:
        """Flights that no connection was there for; they do not wait any more."""
        flights = list(self._waiting)
        self._waiting.clear()
        return flights

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for connection in self._idle:
            connection.abort()

    async def _connect(self) -> None:
        try:
            connection = await self._connector.connect()
        except OSError as error:
            self._connecting -= 1
            self.refused += 1
            flight = self._waiting.popleft() if self._waiting else None
            if flight is None:
                self._spare = max(0, self._spare - 1)
            self._user.connect_failed(flight, error)
            return
        self._connecting -= 1
        self.refused = 0
        self.last_contact_ns = time.monotonic_ns()
        if connection.is_open:
            if not self._waiting:
                self._spare = max(0, self._spare - 1)
            self.give(connection)
        self.connect_as_needed()
