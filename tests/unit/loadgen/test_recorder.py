"""When the records of ended requests are written."""

from __future__ import annotations

from typing import cast

from benchctl.loadgen.connection import Flight
from benchctl.loadgen.recorder import MOST_UNWRITTEN, Recorder
from benchctl.loadgen.records import Cause, Record, RecordFile
from workloads.base import WorkloadRequest


class Written(list[Record]):
    def add(self, record: Record) -> None:
        self.append(record)


def test_what_waits_for_a_quiet_moment_is_bounded() -> None:
    """A load whose sockets are never quiet: nobody calls `write_one`, and yet the records go to the file."""
    written = Written()
    recorder = Recorder(cast(RecordFile, written), worker=0, tokenizer=None)
    total = MOST_UNWRITTEN + 100
    for index in range(total):
        request = WorkloadRequest(index=index, prompt="a", max_tokens=1)
        recorder.ended(Flight(index, request, b"", scheduled_ns=1, ready_ns=1), Cause.OK, 2)
    assert [record.index for record in written] == list(range(100)), "the oldest first"
    while recorder.write_one():
        pass
    assert [record.index for record in written] == list(range(total))
    assert recorder.take_report(0, 0).completed == total
