"""Which worker sends what: a split of the schedule that any number of workers can make, each on its own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from workloads.arrivals import Schedule
from workloads.base import WorkloadRequest
from workloads.token_ids import GeneratedRequests

Positions = npt.NDArray[np.int64]


class Share(msgspec.Struct, kw_only=True):
    """What one worker sends."""

    worker: int
    workers: int
    requests: dict[int, WorkloadRequest] | GeneratedRequests
    """By position; a generated workload travels whole, as it is small."""
    first: Positions
    """Positions of requests that wait for no other, in order: single requests and first turns."""
    later: dict[int, list[int]]
    """First turn -> the positions of the turns after it."""
    times_ns: npt.NDArray[np.int64] | None
    """Due time of each of `first` after the start; None: closed loop."""
    turn_times_ns: dict[int, int]
    """Earliest time of each later turn in an open loop."""
    concurrency: int | None
    """This worker's users (closed loop) or most requests in flight (open loop)."""
    duration_ns: int | None

    def due(self, begin: int, until_ns: int) -> list[tuple[int, int]]:
        """(position, due time) of those of `first` from number `begin` on that an open loop has due by `until_ns`."""
        if self.times_ns is None:
            return []
        end = int(np.searchsorted(self.times_ns, until_ns, side="right"))
        return [(int(self.first[number]), int(self.times_ns[number])) for number in range(begin, end)]


def split(requests: Sequence[WorkloadRequest], schedule: Schedule, workers: int) -> list[Share]:
    """Shares of at most `workers` workers: units (a request, or a whole conversation) go round in schedule order.

    Users, and places under a cap, are divided evenly; there are never more workers than users, places or units.
    """
    n_due = len(requests) if schedule.times_s is None else min(len(requests), len(schedule.times_s))
    first, later = _units(requests, n_due)
    workers = max(1, min(workers, len(first), schedule.concurrency or len(first)))
    times_ns = None if schedule.times_s is None else np.round(schedule.times_s * 1e9).astype(np.int64)
    return [_share(requests, schedule, times_ns, first, later, worker, workers) for worker in range(workers)]


def _units(requests: Sequence[WorkloadRequest], n_due: int) -> tuple[Positions, dict[int, list[int]]]:
    if isinstance(requests, GeneratedRequests):
        return np.arange(n_due, dtype=np.int64), {}
    conversations: dict[int, list[int]] = {}
    first: list[int] = []
    for position in range(n_due):
        conversation = requests[position].conversation
        if conversation is None:
            first.append(position)
        elif conversation in conversations:
            conversations[conversation].append(position)
        else:
            conversations[conversation] = [position]
            first.append(position)
    later = {}
    for turns in conversations.values():
        # Turns are in order in every workload of ours; a file of somebody else's may hold them in any.
        ordered = sorted(turns, key=lambda position: requests[position].turn)
        if ordered[0] != turns[0]:
            first[first.index(turns[0])] = ordered[0]
        if len(ordered) > 1:
            later[ordered[0]] = ordered[1:]
    return np.array(first, dtype=np.int64), later


def _share(
    requests: Sequence[WorkloadRequest],
    schedule: Schedule,
    times_ns: npt.NDArray[np.int64] | None,
    first: Positions,
    later: dict[int, list[int]],
    worker: int,
    workers: int,
) -> Share:
    mine = first[worker::workers]
    if times_ns is not None:
        mine = mine[np.argsort(times_ns[mine], kind="stable")]
    my_later = {int(p): later[int(p)] for p in mine if int(p) in later} if later else {}
    turns = [position for positions in my_later.values() for position in positions]
    concurrency = schedule.concurrency
    return Share(
        worker=worker,
        workers=workers,
        requests=requests
        if isinstance(requests, GeneratedRequests)
        else {position: requests[position] for position in [*mine.tolist(), *turns]},
        first=mine,
        later=my_later,
        times_ns=None if times_ns is None else times_ns[mine],
        turn_times_ns={} if times_ns is None else {position: int(times_ns[position]) for position in turns},
        concurrency=None
        if concurrency is None
        else concurrency // workers + (1 if worker < concurrency % workers else 0),
        duration_ns=None if schedule.duration_s is None else round(schedule.duration_s * 1e9),
    )
