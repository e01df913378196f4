"""Lets requests in a few at a time, so that a burst of them does not hold up the tokens of those before it."""

from __future__ import annotations

import asyncio
from collections import deque

REQUESTS_PER_TURN = 8
"""Requests that one turn of the event loop takes in: about a millisecond of work. Between two turns the loop looks at
its sockets, the engine's among them."""


class Intake:
    """Hands out turns in order of arrival. Used in the event loop only."""

    def __init__(self, per_turn: int = REQUESTS_PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._refilling = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait until a request may be taken in: not at all while few come."""
        if self._left and not self._waiting:
            self._left -= 1
            if not self._refilling:
                self._refilling = True
                asyncio.get_running_loop().call_soon(self._refill)
        else:  # `_refill` is on its way
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn

    def _refill(self) -> None:
        """Called once per turn of the loop while requests come."""
        left = self._per_turn
        while left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                left -= 1
        self._left = left
        self._refilling = left < self._per_turn
        if self._refilling:
            asyncio.get_running_loop().call_soon(self._refill)
