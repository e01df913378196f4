"""Waiting requests, in order of the scheduling policy."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Literal

from server.engine.request import Request


class WaitingQueue(ABC):
    """Requests that wait for their first step, or for their next one after a preemption."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def push(self, request: Request) -> None: ...

    @abstractmethod
    def push_preempted(self, request: Request) -> None:
        """Back in, ahead of all that came later. Of several, the one that came last is pushed first."""

    @abstractmethod
    def peek(self) -> Request | None:
        """The next request, left where it is."""

    @abstractmethod
    def pop(self) -> Request:
        """Take the next request out. Raises IndexError or KeyError when nobody waits."""

    @abstractmethod
    def discard(self, request: Request) -> None:
        """Take out a request that ended while it waited here."""


class FcfsQueue(WaitingQueue):
    """First come, first served; the preempted first of all."""

    def __init__(self) -> None:
        # Ordered, with removal from the middle in O(1): a client that goes away takes its prompt along.
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def push_preempted(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request | None:
        return next(iter(self._requests.values()), None)

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def discard(self, request: Request) -> None:
        del self._requests[request.request_id]


class PriorityQueue(WaitingQueue):
    """Smallest `priority` first, then order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []
        self._waiting: set[str] = set()
        self._counter = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        self._waiting.add(request.request_id)
        heapq.heappush(self._heap, (request.priority, request.queued_ns, next(self._counter), request))

    def push_preempted(self, request: Request) -> None:
        self.push(request)

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][3].request_id not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def pop(self) -> Request:
        self.peek()
        request = heapq.heappop(self._heap)[3]
        self._waiting.remove(request.request_id)
        return request

    def discard(self, request: Request) -> None:
        self._waiting.remove(request.request_id)
        # The ended are skipped when they come up, which at the lowest priority may be never: keep them a minority.
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[3].request_id in self._waiting]
            heapq.heapify(self._heap)


def make_queue(policy: Literal["fcfs", "priority"]) -> WaitingQueue:
    return FcfsQueue() if policy == "fcfs" else PriorityQueue()
