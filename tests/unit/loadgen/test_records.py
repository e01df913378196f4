"""The file of raw records: what goes in comes out, whatever happened to the end of the file."""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from benchctl.loadgen.records import Cause, RecordFile, Records, create_records
from server.errors import UserError
from tests.unit.loadgen.recording import START_NS, ns, record, write


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    records = write(
        tmp_path / "r",
        [
            record(4, 1.5, [10, 20.25, 20.25], sent=2, ready=1.75, tokens=[1, 2, 70_000], output=9, retries=300),
            record(2, 3, [], cause=Cause.HTTP, status=503, end=7, output=-1, prompt=-1, worker=3),
            record(0, 5, [6]),
            record(1, 8, [5_000_000]),
        ],
        per_block=2,
    )
    rows = records.rows
    assert records.start_ns == START_NS
    assert rows["index"].tolist() == [4, 2, 0, 1]
    first = rows[0]
    assert (first["scheduled_ns"], first["ready_ns"], first["sent_ns"]) == (ns(1.5), ns(1.75), ns(2))
    assert (first["first_ns"], first["last_ns"], first["end_ns"]) == (ns(10), ns(20.25), ns(20.25))
    assert (first["n_events"], first["output_tokens"], first["prompt_tokens"], first["retries"]) == (3, 9, 10, 255)
    failed = rows[1]
    assert (failed["cause"], failed["http_status"], failed["worker"]) == (Cause.HTTP, 503, 3)
    assert (failed["first_ns"], failed["end_ns"], failed["output_tokens"]) == (0, ns(7), -1)
    (_, events), (_, more) = records.blocks()
    assert events["offset_us"].tolist() == [0, 10_250, 10_250]
    assert events["tokens"].tolist() == [1, 2, 0xFFFF]
    assert more["offset_us"].tolist() == [0, 0]


def test_a_file_cut_off_anywhere_gives_the_blocks_before(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, [record(index, index, [index + 1, index + 2]) for index in range(4)], per_block=1)
    whole = path.read_bytes()
    block = (len(whole) - whole.index(b"BLK1")) // 4
    for cut in range(0, 4 * block, 7):
        path.write_bytes(whole[: len(whole) - cut])
        assert len(Records(path).rows) == 4 - -(-cut // block)
    path.write_bytes(whole + b"garbage that is no block")
    assert len(Records(path).rows) == 4


def test_no_records_at_all(tmp_path: Path) -> None:
    create_records(tmp_path / "r", {"start_ns": 1})
    records = Records(tmp_path / "r")
    assert len(records.rows) == 0
    assert list(records.blocks()) == []


@pytest.mark.parametrize("data", [b"", b"x", b"benchctl-records\x00", b"benchctl-records\x00\x02\x00\x00\x00{]"])
def test_another_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "r").write_bytes(data)
    with pytest.raises(UserError, match="not a file of benchctl's raw records"):
        Records(tmp_path / "r")
    with pytest.raises(UserError, match="No such file"):
        Records(tmp_path / "absent")


def test_another_version_is_named(tmp_path: Path) -> None:
    create_records(tmp_path / "r", {"start_ns": 1})
    data = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(data.replace(b'"version":1', b'"version":9'))
    with pytest.raises(UserError, match="records of version 9"):
        Records(tmp_path / "r")


def test_writers_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r"
    create_records(path, {"start_ns": 1})

    def write_some(worker: int) -> None:
        file = RecordFile(path)
        for index in range(200):
            file.add(record(index, index, [index + 1.0] * (index % 5), worker=worker))
            if index % 7 == 0:
                file.flush()
        file.close()

    threads = [threading.Thread(target=write_some, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = Records(path)
    assert len(records.rows) == 800
    for rows, events in records.blocks():
        assert rows["n_events"].sum() == len(events)
        assert len(set(rows["worker"].tolist())) == 1
    for worker in range(4):
        mine = records.rows[records.rows["worker"] == worker]
        assert mine["index"].tolist() == list(range(200))


def test_a_full_disk_is_noted_and_leaves_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r"
    create_records(path, {"start_ns": 1})
    file = RecordFile(path)
    file.add(record(0, 0, [1]))
    file.flush()
    while path.stat().st_size < 100:
        os.sched_yield()
    real_write, full = os.write, threading.Event()

    def write_half(fd: int, data: memoryview) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        full.set()
        return real_write(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write_half)
    file.add(record(1, 0, [1] * 1000))
    file.flush()
    file.add(record(2, 0, [1]))
    file.close()
    assert file.error is not None
    assert file.error.errno == errno.ENOSPC
    assert Records(path).rows["index"].tolist() == [0]


def test_memory_stays_flat(tmp_path: Path) -> None:
    path = tmp_path / "r"
    create_records(path, {"start_ns": 1})
    file = RecordFile(path)
    item = record(0, 0, list(np.arange(50.0)))
    for _ in range(2000):
        file.add(item)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20_000):
        file.add(item)
        if file._queue.qsize() > 4:  # a test writes faster than any load
            while not file._queue.empty():
                os.sched_yield()
    file.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024
    assert len(Records(path).rows) == 22_000
