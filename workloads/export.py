"""Our own JSONL: a header line, then one request a line. What `export_workload` writes, `replay_export` reads back."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from server.errors import UserError
from workloads.base import OnRead, RequestDigest, Workload, WorkloadRequest, requests_digest
from workloads.files import explain_broken_json, iter_lines, parse_json_line
from workloads.token_ids import GeneratedRequests
from workloads.trace_rows import EXPORT_KEY

VERSION = 1


class ExportHeader(msgspec.Struct, kw_only=True):
    """First line of an export."""

    benchctl_workload: int = VERSION
    """Version of the format."""
    name: str
    parameters: dict[str, Any]
    seed: int
    digest: str
    num_requests: int
    tokenizer: str | None = None
    dropped: dict[str, int] = {}
    notes: list[str] = []


def export_workload(workload: Workload, file: BinaryIO, on_read: OnRead | None = None) -> ExportHeader:
    """Write `workload` to a binary file, a line at a time; returns the line before its requests.

    `on_read` follows the reading for the digest, which stands first.
    """
    encoder = msgspec.json.Encoder(order="deterministic")
    header = ExportHeader(
        name=workload.name,
        parameters=workload.parameters,
        seed=workload.seed,
        digest=requests_digest(workload.requests, on_read),
        num_requests=len(workload.requests),
        tokenizer=workload.tokenizer,
        dropped=workload.dropped,
        notes=workload.notes,
    )
    file.write(encoder.encode(header) + b"\n")
    for request in workload.requests:
        file.write(encoder.encode(request) + b"\n")
    return header


class _MakeFromFile:
    """Request i read from its line: the file is the memory."""

    def __init__(self, path: Path, offsets: array[int], times_s: array[float]) -> None:
        self._path, self._offsets, self._times_s = path, offsets, times_s

    def __call__(self, index: int) -> WorkloadRequest:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offsets[index])
                request = msgspec.json.decode(file.readline(), type=WorkloadRequest)
        except (OSError, msgspec.DecodeError) as error:
            raise UserError(f"{self._path}: changed while it was replayed ({error})") from None
        request.index = index
        request.timestamp_s = self.timestamp_s(index)
        return request

    def timestamp_s(self, index: int) -> float | None:
        """Seconds from the start of the run, or None; NaN stands for None in the array."""
        time_s = self._times_s[index]
        return None if math.isnan(time_s) else time_s


def replay_export(
    path: Path,
    parameters: dict[str, Any],
    *,
    seed: int,
    start_s: float = 0.0,
    end_s: float | None = None,
    speedup: float = 1.0,
    num_requests: int | None = None,
) -> Workload:
    """The exported workload again; unsliced and at its own speed it has the exported digest.

    Every line is checked once here; requests are read again from the file when they are looked at.

    Raises:
        UserError: a line that is not a request (named), another version, timing asked of requests without times, or
            nothing left.
    """
    header = _header(path)
    timed = start_s > 0 or end_s is not None or speedup != 1.0
    offsets, times_s = array("q"), array("d")
    digest = RequestDigest()
    outside = rows = 0
    for line, offset, request in _offsets_and_requests(path):
        rows += 1
        digest.add(request)
        if timed and request.timestamp_s is None:
            raise UserError(f"{path}: line {line}: no timestamp_s, so start_s, end_s and speedup do not apply")
        if timed and not start_s <= (request.timestamp_s or 0.0) < (float("inf") if end_s is None else end_s):
            outside += 1
            continue
        if num_requests is not None and len(offsets) == num_requests:
            continue
        offsets.append(offset)
        times_s.append(math.nan if request.timestamp_s is None else (request.timestamp_s - start_s) / speedup)
    if not offsets:
        raise UserError(f"{path}: no request is left" + (" between start_s and end_s" if rows else ""))
    notes = [f"replayed from an export of `{header.name}`", *header.notes]
    if digest.hexdigest() != header.digest:
        notes.append("the file was changed after its export: its requests no longer have the digest in its header")
    make = _MakeFromFile(path, offsets, times_s)
    return Workload(
        name="trace",
        parameters={**parameters, "format": "jsonl"},
        seed=seed,
        requests=GeneratedRequests(make, range(len(offsets))),
        dropped={**header.dropped, **({"outside start_s to end_s": outside} if outside else {})},
        tokenizer=header.tokenizer,
        notes=notes,
    )


def _header(path: Path) -> ExportHeader:
    number, line = next((number, line) for number, line in iter_lines(path) if line.strip())
    row = parse_json_line(path, number, line)
    if EXPORT_KEY not in row:
        raise UserError(f"{path}: line {number}: not an export: no `{EXPORT_KEY}` in its first line")
    if row[EXPORT_KEY] != VERSION:
        raise UserError(f"{path}: line {number}: format version {row[EXPORT_KEY]!r}; this program reads {VERSION}")
    try:
        return msgspec.convert(row, ExportHeader)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: line {number}: {error}") from None


def _offsets_and_requests(path: Path) -> Iterator[tuple[int, int, WorkloadRequest]]:
    """Line number, byte offset and request of every line after the header."""
    decoder = msgspec.json.Decoder(WorkloadRequest)
    offset, seen_header = 0, False
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            start, offset = offset, offset + len(raw)
            if not raw.strip():
                continue
            if not seen_header:
                seen_header = True
                continue
            try:
                request = decoder.decode(raw)
            except msgspec.ValidationError as error:
                raise UserError(f"{path}: line {number}: {error}") from None
            except msgspec.DecodeError as error:
                explain_broken_json(path, raw.rstrip(b"\r\n"), error, first_line=number)
            if problem := _problem(request):
                raise UserError(f"{path}: line {number}: {problem}")
            yield number, start, request


def _problem(request: WorkloadRequest) -> str | None:
    """What makes a well-typed request impossible to send, or None."""
    bodies = [request.prompt_token_ids, request.prompt, request.messages]
    given = [body for body in bodies if body is not None]
    if len(given) != 1:
        return "needs exactly one of prompt_token_ids, prompt and messages"
    if not given[0]:
        return "its prompt is empty"
    if request.prompt_token_ids is not None and min(request.prompt_token_ids) < 0:
        return "a token id is negative"
    if request.max_tokens < 1:
        return f"max_tokens {request.max_tokens} is below 1"
    for name in ("timestamp_s", "think_time_s"):
        value = getattr(request, name)
        if value is not None and value < 0:
            return f"{name} {value} is negative"
    return None
