"""One worker: a share of the schedule in, records out. It runs on any asyncio loop and knows no other process."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable

from benchctl.loadgen.assign import Share
from benchctl.loadgen.connection import Connection, Flight
from benchctl.loadgen.endpoint import Connector, RequestEncoder, as_messages, explain_refusal, parse_endpoint
from benchctl.loadgen.options import LoadOptions
from benchctl.loadgen.pool import ConnectionPool
from benchctl.loadgen.recorder import Recorder, Report
from benchctl.loadgen.records import Cause, RecordFile
from benchctl.loadgen.retry import may_retry, pause_s
from benchctl.loadgen.stream import AnswerStream
from benchctl.loadgen.timer import DeadlineTimer
from benchctl.loadgen.transport import SocketPoller
from workloads.base import Message, WorkloadRequest

LOOKAHEAD_NS = 50_000_000
"""How long before it is due a request is encoded and a connection for it opened."""
SPIN_NS = 80_000
"""A sleeping process wakes 30 to 60 us late, which at 1,000 requests per second would bunch arrivals that are closer
than that: the timer is set so much earlier, and the rest is waited for with the clock in the hand."""
REPORT_INTERVAL_S = 0.25
_SWEEP_INTERVAL_S = 0.05
_PREPARE_AT_ONCE = 2
"""Requests prepared between two looks at the sockets."""
_MOST_AHEAD = 64
"""Requests that a closed loop has encoded before they are due, at most one per user."""
_GIVE_UP_CONNECTS = 50
_GIVE_UP_NS = 5_000_000_000
_REFUSED_PAUSE_NS = 100_000_000
"""A user of a closed loop whose connection was refused waits this long: the workload must not burn down at once."""


class LoadWorker:
    """Sends its share from `start_ns` on; `run` returns when everything has ended or `cancel` was called."""

    def __init__(
        self,
        share: Share,
        options: LoadOptions,
        records: RecordFile,
        on_report: Callable[[Report], None],
    ) -> None:
        self._share = share
        self._options = options
        self._recorder = Recorder(records, worker=share.worker, tokenizer=options.tokenizer)
        self._on_report = on_report
        endpoint = parse_endpoint(options.url, options.endpoint)
        self._encoder = RequestEncoder(
            endpoint,
            model=options.model,
            chat=options.endpoint == "chat",
            api_key=options.api_key,
            force_lengths=options.force_lengths,
            continuous_usage=options.continuous_usage,
        )
        self._loop = asyncio.get_running_loop()
        self._poller = SocketPoller(self._loop)
        connector = Connector(endpoint, self._poller, lambda: Connection(self, self._loop), options.connect_timeout_s)
        self._pool = ConnectionPool(self, connector)
        self._timer = DeadlineTimer(self._loop, self._tick)
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._closed_loop = share.times_ns is None
        self._start_ns = 0
        self._next = 0
        self._prepared: deque[Flight] = deque()
        self._later: list[tuple[int, int, Flight]] = []
        """Heap of flights that are due at a time of their own: later turns and retries."""
        self._sequence = 0
        self._capped: deque[Flight] = deque()
        self._flying: dict[Flight, Connection] = {}
        self._active = 0
        self._turns: dict[int, list[int]] = {}
        """Position of the turn in flight -> positions of the turns after it."""
        self._history: dict[int, list[Message]] = {}
        self._stopping = False
        self._last_answer_ns = 0
        self._tidying = False
        self._wanted_ahead = min(share.concurrency or 0, _MOST_AHEAD)
        self.aborted: str | None = None
        """Why the worker gave up, or None."""

    @property
    def error_details(self) -> dict[str, str]:
        """One message per cause of failure."""
        return self._recorder.error_details

    async def run(self, start_ns: int) -> None:
        """Send everything; `start_ns` is CLOCK_MONOTONIC, equal for all workers, and not far in the future."""
        self._start_ns = start_ns
        self._loop.set_exception_handler(self._on_loop_error)
        sweep = self._loop.create_task(self._sweep())
        try:
            if self._closed_loop:
                self._prepare_users()
            self._tick()
            await self._ended
        finally:
            sweep.cancel()
            self._timer.close()
            self._pool.close()
            for connection in self._flying.values():
                connection.abort()
            self._poller.close()
            while self._recorder.write_one():
                pass
            self._send_report()

    def cancel(self) -> None:
        """End now: what is in flight or due is recorded as interrupted, what is due later is not recorded."""
        self._stopping = True
        now_ns = time.monotonic_ns()
        for flight in self._take_overdue(now_ns):
            self._record(flight, Cause.INTERRUPTED, now_ns)
        for flight, connection in list(self._flying.items()):
            connection.abort()
            self._record(flight, Cause.INTERRUPTED, now_ns)
        self._flying.clear()
        if not self._ended.done():
            self._ended.set_result(None)

    def _take_overdue(self, now_ns: int) -> list[Flight]:
        """What was due before `now_ns` and is not in flight, as an overload leaves it behind; none of it waits on."""
        overdue = [*self._capped, *self._pool.take_waiting()]
        overdue += [flight for _, _, flight in self._later if flight.attempts or flight.scheduled_ns <= now_ns]
        if not self._closed_loop:
            overdue += [flight for flight in self._prepared if flight.scheduled_ns <= now_ns]
        if self._start_ns:
            due = self._share.due(self._next, now_ns - self._start_ns)
            overdue += [self._unencoded(position, self._start_ns + after_ns) for position, after_ns in due]
            self._next = len(self._share.first)
        self._capped.clear()
        self._later.clear()
        self._prepared.clear()
        return overdue

    # --- when ---

    def _tick(self) -> None:
        """Send what is due, then prepare what will be due soon; sending goes first."""
        if self._ended.done():
            return
        share, start_ns = self._share, self._start_ns
        prepared = 0
        while True:
            now_ns = time.monotonic_ns()
            if self._prepared and not self._closed_loop and self._prepared[0].scheduled_ns - SPIN_NS <= now_ns:
                due_ns = self._prepared[0].scheduled_ns
                while now_ns < due_ns:
                    now_ns = time.monotonic_ns()
                self._due(self._prepared.popleft())
            elif self._later and self._later[0][0] <= now_ns:
                self._due(heapq.heappop(self._later)[2])
            elif (
                share.times_ns is not None
                and self._next < len(share.first)
                and start_ns + int(share.times_ns[self._next]) - LOOKAHEAD_NS <= now_ns
                and not self._stopping
            ):
                if prepared == _PREPARE_AT_ONCE:
                    break
                prepared += 1
                self._prepare_next()
            else:
                break
        self._arm()
        self._check_end()

    def _arm(self) -> None:
        times = []
        if self._prepared and not self._closed_loop:
            times.append(self._prepared[0].scheduled_ns - SPIN_NS)
        if self._later:
            times.append(self._later[0][0])
        if self._share.times_ns is not None and self._next < len(self._share.first) and not self._stopping:
            times.append(self._start_ns + int(self._share.times_ns[self._next]) - LOOKAHEAD_NS)
        if times:
            self._timer.arm(min(times))

    def _prepare_next(self) -> None:
        """Encode the next request of an open loop and see that a connection will be there for it."""
        assert self._share.times_ns is not None
        position = int(self._share.first[self._next])
        due_ns = self._start_ns + int(self._share.times_ns[self._next])
        self._next += 1
        self._prepared.append(self._make_flight(position, due_ns))
        self._reserve(len(self._prepared))

    def _reserve(self, wanted: int) -> None:
        """See that so many connections are idle, or will be."""
        if self._share.concurrency is not None:
            wanted = min(wanted, self._share.concurrency - self._active)
        self._pool.reserve(wanted)

    def _prepare_users(self) -> None:
        """The first request of every user of a closed loop."""
        assert self._share.concurrency is not None
        users = min(self._share.concurrency, len(self._share.first))
        for _ in range(users):
            position = int(self._share.first[self._next])
            self._next += 1
            self._push_later(self._start_ns, self._make_flight(position, self._start_ns))
        self._reserve(users)
        self._tidy_soon()

    def _prepare_ahead(self) -> bool:
        """Encode one more request of a closed loop; False when there is none."""
        if self._stopping or self._next >= len(self._share.first):
            return False
        position = int(self._share.first[self._next])
        self._next += 1
        self._prepared.append(self._make_flight(position, 0))
        return True

    def _next_of_user(self, free_ns: int) -> None:
        """A user of a closed loop is free since `free_ns`: its next request is due now."""
        if self._stopping or self._is_over(free_ns):
            return
        if not self._prepared and not self._prepare_ahead():
            return
        flight = self._prepared.popleft()
        flight.scheduled_ns = flight.ready_ns = free_ns
        if self._pool.refused:
            self._push_later(free_ns + _REFUSED_PAUSE_NS, flight)
            self._arm()
        else:
            self._launch(flight)
        self._tidy_soon()

    def _is_over(self, at_ns: int) -> bool:
        duration_ns = self._share.duration_ns
        return duration_ns is not None and at_ns >= self._start_ns + duration_ns

    def _push_later(self, due_ns: int, flight: Flight) -> None:
        self._sequence += 1
        heapq.heappush(self._later, (due_ns, self._sequence, flight))

    # --- what ---

    def _make_flight(self, position: int, due_ns: int) -> Flight:
        request = self._share.requests[position]
        if position in self._share.later:
            self._turns[position] = self._share.later[position]
        flight = Flight(position, request, self._encoder.encode(request), scheduled_ns=due_ns, ready_ns=due_ns)
        self._reset_answer(flight)
        return flight

    def _reset_answer(self, flight: Flight) -> None:
        request = flight.request
        assert isinstance(request, WorkloadRequest)
        keep_text = self._options.tokenizer is not None or (flight.index in self._turns and self._appends(flight.index))
        flight.answer = AnswerStream(keep_text=keep_text)
        flight.end_ns = flight.http_status = 0
        flight.retry_after_s = None

    def _appends(self, position: int) -> bool:
        return self._share.requests[self._turns[position][0]].append_reply

    # --- sending ---

    def _due(self, flight: Flight) -> None:
        if self._stopping:
            return
        if flight.attempts:
            self._pool.take(flight)  # a retry has kept its place
        elif not self._closed_loop and self._share.concurrency is not None and self._active >= self._share.concurrency:
            self._capped.append(flight)
        else:
            self._launch(flight)

    def _launch(self, flight: Flight) -> None:
        self._active += 1
        self._pool.take(flight)

    def send(self, flight: Flight, connection: Connection) -> None:
        connection.send(flight)
        flight.deadline_ns = time.monotonic_ns() + int(self._options.timeout_s * 1e9)
        self._flying[flight] = connection

    def connect_failed(self, flight: Flight | None, error: OSError) -> None:
        if self._stopping:
            return
        now_ns, why = time.monotonic_ns(), explain_refusal(error, self._options.connect_timeout_s)
        if flight is not None:
            flight.attempts += 1
            flight.detail = why
            self.flight_ended(flight, Cause.CONNECT, now_ns)
        contact_ns = max(self._pool.last_contact_ns, self._last_answer_ns)
        if self._pool.refused >= _GIVE_UP_CONNECTS and now_ns - contact_ns > _GIVE_UP_NS:
            self.aborted = f"{self._options.url} takes no connections any more: {why}"
            self.cancel()
        else:
            self._pool.connect_as_needed()

    # --- what comes back (connection.Owner) ---

    def connection_idle(self, connection: Connection) -> None:
        self._pool.give(connection)

    def connection_lost(self, connection: Connection) -> None:
        self._pool.lost(connection)

    def flight_stale(self, flight: Flight) -> None:
        self._flying.pop(flight, None)
        if not self._stopping:
            self._pool.take(flight)

    def flight_ended(self, flight: Flight, cause: Cause, now_ns: int) -> None:
        self._flying.pop(flight, None)
        if self._stopping:
            self._record(flight, cause, now_ns)
            self._active -= 1
            self._check_end()
            return
        if cause and may_retry(flight, cause, self._options):
            due_ns = now_ns + int(pause_s(flight) * 1e9)
            self._reset_answer(flight)
            self._push_later(due_ns, flight)
            self._arm()
            return
        self._record(flight, cause, now_ns)
        self._active -= 1
        follows = self._next_turn(flight, cause, now_ns)
        if self._closed_loop:
            if not follows:
                self._next_of_user(now_ns)
        elif self._capped:
            waiting = self._capped.popleft()
            waiting.ready_ns = max(waiting.ready_ns, now_ns)
            self._launch(waiting)
        self._check_end()

    def _next_turn(self, flight: Flight, cause: Cause, now_ns: int) -> bool:
        """Schedule the turn after this one; False when the conversation is over."""
        turns = self._turns.pop(flight.index, None)
        request = flight.request
        assert isinstance(request, WorkloadRequest)
        if not turns:
            if request.conversation is not None:
                self._history.pop(request.conversation, None)
            return False
        position, after = turns[0], turns[1:]
        following = self._share.requests[position]
        history: list[Message] = []
        if following.append_reply:
            assert request.conversation is not None
            if cause:
                for lost in turns:
                    self._record_unsent(lost, now_ns)
                self._history.pop(request.conversation, None)
                return False
            history = self._history.setdefault(request.conversation, [])
            history.extend(as_messages(request))
            history.append(Message("assistant", "".join(flight.answer.texts)))
        due_ns = now_ns + int(following.think_time_s * 1e9)
        due_ns = max(due_ns, self._start_ns + self._share.turn_times_ns.get(position, 0))
        if self._is_over(due_ns):
            return False
        if after:
            self._turns[position] = after
        turn = Flight(
            position, following, self._encoder.encode(following, history), scheduled_ns=due_ns, ready_ns=due_ns
        )
        self._reset_answer(turn)
        if due_ns <= now_ns:
            self._due(turn)
        else:
            self._push_later(due_ns, turn)
            self._arm()
        return True

    def _check_end(self) -> None:
        if self._ended.done() or self._active or self._later or self._capped:
            return
        all_sent = not self._prepared and self._next >= len(self._share.first)
        if self._stopping or all_sent or (self._closed_loop and self._is_over(time.monotonic_ns())):
            self._ended.set_result(None)

    # --- records ---

    def _record(self, flight: Flight, cause: Cause, now_ns: int) -> None:
        """Count an ended request; writing it down waits until no socket has anything to say."""
        self._recorder.ended(flight, cause, now_ns)
        if not cause:
            self._last_answer_ns = now_ns
        self._tidy_soon()

    def _tidy_soon(self) -> None:
        if not self._tidying:
            self._tidying = True
            self._loop.call_soon(self._tidy)

    def _tidy(self) -> None:
        """One piece of work that nobody waits for, per turn of the loop: many answers may have ended at once."""
        self._tidying = False
        ahead = self._closed_loop and len(self._prepared) < self._wanted_ahead
        if self._recorder.write_one() or (ahead and self._prepare_ahead()):
            self._tidy_soon()

    def _record_unsent(self, position: int, now_ns: int) -> None:
        flight = self._unencoded(position, now_ns)
        flight.detail = "the answer it continues was not received"
        self._record(flight, Cause.NO_PREVIOUS_TURN, now_ns)

    def _unencoded(self, position: int, due_ns: int) -> Flight:
        """What stands for a request that is not sent."""
        return Flight(position, self._share.requests[position], b"", scheduled_ns=due_ns, ready_ns=due_ns)

    # --- in the background ---

    async def _sweep(self) -> None:
        """End flights whose time is up; report now and then."""
        report_at = 0.0
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            now_ns = time.monotonic_ns()
            expired = []
            for flight in self._flying:  # in the order of sending, so of deadlines
                if flight.deadline_ns > now_ns:
                    break
                expired.append(flight)
            for flight in expired:
                if connection := self._flying.get(flight):
                    flight.detail = f"no end of the answer within {self._options.timeout_s:g} s"
                    connection.expire()
            if now_ns / 1e9 >= report_at:
                report_at = now_ns / 1e9 + REPORT_INTERVAL_S
                self._recorder.flush()
                self._send_report()
                self._check_end()

    def _send_report(self) -> None:
        flying = sum(len(flight.answer.times) for flight in self._flying)
        self._on_report(self._recorder.take_report(self._active, flying))

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """An exception in a callback is a defect of ours: end the worker with it instead of measuring on."""
        error = context.get("exception")
        if not self._ended.done():
            self._ended.set_exception(
                error if isinstance(error, Exception) else RuntimeError(str(context.get("message")))
            )
