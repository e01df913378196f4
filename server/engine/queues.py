"""Waiting requests, in order of the scheduling policy."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import deque
from typing import Literal

from server.engine.request import Request, Status


class WaitingQueue(ABC):
    """Requests that ended while they waited are skipped, not searched for."""

    def __init__(self) -> None:
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        self._size += 1
        self._push(request)

    def push_preempted(self, request: Request) -> None:
        """Back in, ahead of all that came later."""
        self._size += 1
        self._push_front(request)

    def peek(self) -> Request | None:
        """The next request that still waits."""
        while (head := self._head()) is not None and head.status is Status.FINISHED:
            self._pop()
        return head

    def pop(self) -> Request:
        self._size -= 1
        return self._pop()

    def discard(self, request: Request) -> None:
        """Count out a request of this queue that has ended."""
        self._size -= 1

    @abstractmethod
    def _push(self, request: Request) -> None: ...

    @abstractmethod
    def _push_front(self, request: Request) -> None: ...

    @abstractmethod
    def _head(self) -> Request | None: ...

    @abstractmethod
    def _pop(self) -> Request: ...


class FcfsQueue(WaitingQueue):
    """First come, first served; the preempted first of all."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: deque[Request] = deque()

    def _push(self, request: Request) -> None:
        self._requests.append(request)

    def _push_front(self, request: Request) -> None:
        self._requests.appendleft(request)

    def _head(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def _pop(self) -> Request:
        return self._requests.popleft()


class PriorityQueue(WaitingQueue):
    """Smallest `priority` first, then order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, int, Request]] = []
        self._counter = itertools.count()

    def _push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.priority, request.queued_ns, next(self._counter), request))

    def _push_front(self, request: Request) -> None:
        self._push(request)

    def _head(self) -> Request | None:
        return self._heap[0][3] if self._heap else None

    def _pop(self) -> Request:
        return heapq.heappop(self._heap)[3]


def make_queue(policy: Literal["fcfs", "priority"]) -> WaitingQueue:
    return FcfsQueue() if policy == "fcfs" else PriorityQueue()
