"""What a worker knows of the requests that have ended: counts at once, records when there is time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from benchctl.loadgen.connection import Flight
from benchctl.loadgen.records import CAUSE_LABELS, Cause, Record, RecordFile, TokenSource
from benchctl.loadgen.stream import AnswerStream
from server.errors import printable
from workloads.base import WorkloadRequest

if TYPE_CHECKING:
    from workloads.tokenizer import TokenizerLike

_MOST_TTFTS = 200
MOST_UNWRITTEN = 4096
"""Ended flights kept for a quiet moment; beyond it each one that ends makes the oldest be written, so that a load whose
sockets are never quiet does not grow."""


class Report(msgspec.Struct):
    """How far a worker is."""

    completed: int = 0
    failed: int = 0
    in_flight: int = 0
    tokens: int = 0
    """Token events, those of requests in flight included."""
    ttft_s: list[float] = []
    """Of requests that ended since the last report."""


class Recorder:
    """Takes ended flights of one worker."""

    def __init__(self, file: RecordFile, *, worker: int, tokenizer: str | None) -> None:
        self.report = Report()
        self.error_details: dict[str, str] = {}
        """One message per cause of failure."""
        self.token_events = 0
        """Of ended requests."""
        self._file = file
        self._worker = worker
        self._tokenizer_name = tokenizer
        self._tokenizer: TokenizerLike | None = None
        self._unwritten: deque[tuple[Flight, Cause, int]] = deque()

    def ended(self, flight: Flight, cause: Cause, now_ns: int) -> None:
        """Count it; its record is written by `write_one`."""
        answer, report = flight.answer, self.report
        self._unwritten.append((flight, cause, now_ns))
        self.token_events += len(answer.times)
        if not cause:
            report.completed += 1
            if answer.times:
                report.ttft_s.append((answer.times[0] - flight.scheduled_ns) / 1e9)
        elif cause is not Cause.INTERRUPTED:
            report.failed += 1
            label = CAUSE_LABELS.get(cause) or f"http {flight.http_status}"
            # In the words of a server that need not mean well.
            self.error_details.setdefault(label, printable(flight.detail or answer.detail))
        if len(self._unwritten) > MOST_UNWRITTEN:
            self.write_one()

    def write_one(self) -> bool:
        """Hand the oldest record to the file; False when there is none."""
        if not self._unwritten:
            return False
        flight, cause, now_ns = self._unwritten.popleft()
        answer, request = flight.answer, flight.request
        assert isinstance(request, WorkloadRequest)
        output_tokens, source = self._count_output(answer, cause)
        prompt_tokens = answer.prompt_tokens if answer.prompt_tokens is not None else request.prompt_tokens
        self._file.add(
            Record(
                index=request.index,
                worker=self._worker,
                cause=cause,
                retries=max(0, flight.attempts - 1),
                http_status=flight.http_status,
                token_source=source,
                scheduled_ns=flight.scheduled_ns,
                ready_ns=flight.ready_ns,
                sent_ns=flight.sent_ns,
                end_ns=flight.end_ns or now_ns,
                prompt_tokens=-1 if prompt_tokens is None else prompt_tokens,
                output_tokens=output_tokens,
                times_ns=answer.times,
                tokens=answer.tokens,
            )
        )
        return True

    def flush(self) -> None:
        """Let the file write what it was handed."""
        self._file.flush()

    def take_report(self, in_flight: int, their_token_events: int) -> Report:
        """The report of now; `their_token_events` are those of the requests in flight."""
        report = self.report
        taken = Report(
            completed=report.completed,
            failed=report.failed,
            in_flight=in_flight,
            tokens=self.token_events + their_token_events,
            ttft_s=report.ttft_s[-_MOST_TTFTS:],
        )
        report.ttft_s = []
        return taken

    def _count_output(self, answer: AnswerStream, cause: Cause) -> tuple[int, TokenSource]:
        # Some servers fill their usage with zeros: nothing was generated only when nothing came.
        if answer.completion_tokens or (answer.completion_tokens == 0 and not answer.times):
            return answer.completion_tokens, TokenSource.USAGE
        if cause:
            return -1, TokenSource.NONE
        if self._tokenizer_name is not None:
            if self._tokenizer is None:
                from workloads.tokenizer import load_tokenizer

                self._tokenizer = load_tokenizer(self._tokenizer_name)
            return self._tokenizer.count("".join(answer.texts), add_special_tokens=False), TokenSource.TOKENIZER
        return len(answer.times), TokenSource.EVENTS
