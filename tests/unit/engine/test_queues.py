from __future__ import annotations

import pytest

from server.engine.queues import FcfsQueue, PriorityQueue, WaitingQueue, make_queue
from server.engine.request import Request
from server.ipc.api_to_engine import AddRequest
from server.sampling_params import SamplingParams


def make(name: str, priority: int = 0, queued_ns: int = 0) -> Request:
    return Request(AddRequest(name, 0, [1], SamplingParams(max_tokens=1), 0, priority), queued_ns)


def names(queue: WaitingQueue) -> list[str]:
    found = []
    while len(queue):
        head = queue.peek()
        assert head is queue.pop()
        found.append(head.request_id)
    assert queue.peek() is None
    return found


def test_selection() -> None:
    assert isinstance(make_queue("fcfs"), FcfsQueue)
    assert isinstance(make_queue("priority"), PriorityQueue)


def test_first_come_first_served_with_the_preempted_ahead() -> None:
    queue = FcfsQueue()
    for name in "abcd":
        queue.push(make(name, priority=-ord(name)))
    a, b = queue.pop(), queue.pop()
    # The newest is preempted first.
    queue.push_preempted(b)
    queue.push_preempted(a)
    assert names(queue) == ["a", "b", "c", "d"]


def test_priority_then_arrival() -> None:
    queue = PriorityQueue()
    for name, priority, queued in [("late", 1, 5), ("low", 9, 1), ("early", 1, 2), ("high", 0, 9)]:
        queue.push(make(name, priority, queued))
    high = queue.pop()
    assert high.request_id == "high"
    queue.push_preempted(make("older", 1, 1))
    assert names(queue) == ["older", "early", "late", "low"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_ended_are_not_seen_again(policy: str) -> None:
    queue = make_queue(policy)  # type: ignore[arg-type]
    requests = [make(str(i), queued_ns=i) for i in range(6)]
    for request in requests:
        queue.push(request)
    for i in (0, 3, 5):
        queue.discard(requests[i])
    assert len(queue) == 3
    assert names(queue) == ["1", "2", "4"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_pop_skips_the_ended_without_a_peek(policy: str) -> None:
    queue = make_queue(policy)  # type: ignore[arg-type]
    first, second = make("first", queued_ns=1), make("second", queued_ns=2)
    queue.push(first)
    queue.push(second)
    queue.discard(first)
    assert queue.pop() is second
    with pytest.raises((KeyError, IndexError)):
        queue.pop()


def test_requests_that_ended_behind_others_are_let_go() -> None:
    queue = PriorityQueue()
    queue.push(make("head", priority=0))
    for i in range(1000):
        request = make(str(i), priority=9)
        queue.push(request)
        queue.discard(request)
    assert len(queue._heap) < 40
    assert names(queue) == ["head"]
