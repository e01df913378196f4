"""Raw records as a worker writes them, from times in milliseconds."""

from __future__ import annotations

from pathlib import Path

from benchctl.loadgen.records import Cause, Record, RecordFile, Records, TokenSource, create_records

START_NS = 1_000_000_000_000


def ns(milliseconds: float) -> int:
    return START_NS + round(milliseconds * 1_000_000)


def record(
    index: int,
    scheduled: float,
    events: list[float],
    *,
    sent: float | None = None,
    ready: float | None = None,
    end: float | None = None,
    output: int | None = None,
    prompt: int = 10,
    tokens: list[int] | None = None,
    cause: Cause = Cause.OK,
    status: int = 200,
    retries: int = 0,
    source: TokenSource = TokenSource.USAGE,
    worker: int = 0,
) -> Record:
    """A request scheduled, sent (default: at once) and answered at these milliseconds after the start."""
    ready = scheduled if ready is None else ready
    sent = ready if sent is None else sent
    last = events[-1] if events else sent
    return Record(
        index=index,
        worker=worker,
        cause=cause,
        retries=retries,
        http_status=status,
        token_source=source,
        scheduled_ns=ns(scheduled),
        ready_ns=ns(ready),
        sent_ns=ns(sent),
        end_ns=ns(last if end is None else end),
        prompt_tokens=prompt,
        output_tokens=len(events) if output is None else output,
        times_ns=[ns(event) for event in events],
        tokens=tokens or [],
    )


def write(path: Path, records: list[Record], *, per_block: int = 3) -> Records:
    """A file of these records, in blocks of a few, read back."""
    create_records(path, {"start_ns": START_NS, "workers": 1})
    file = RecordFile(path)
    for number, item in enumerate(records, start=1):
        file.add(item)
        if number % per_block == 0:
            file.flush()
    file.close()
    assert file.error is None
    return Records(path)
