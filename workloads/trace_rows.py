"""Rows of public request traces, as flat arrays: a million rows take tens of megabytes."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from server.errors import UserError
from workloads.files import iter_csv, iter_jsonl, iter_lines, parse_json_line, token_count

TraceFormat = Literal["azure", "mooncake", "burstgpt", "jsonl"]

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
EXPORT_KEY = "benchctl_workload"
"""Key of the header line of our own format."""

_DATETIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


class TraceRows(msgspec.Struct, kw_only=True):
    """Arrivals in order of time, the first at 0."""

    times_s: npt.NDArray[np.float64]
    input_lens: npt.NDArray[np.int64]
    output_lens: npt.NDArray[np.int64]
    hash_ids: npt.NDArray[np.int64] | None = None
    """Mooncake: block hashes of all rows, one row after the other."""
    hash_starts: npt.NDArray[np.int64] | None = None
    """Mooncake: where each row's hashes begin and, one further, end: shape (rows, 2)."""
    dropped: dict[str, int] = {}
    notes: list[str] = []

    def __len__(self) -> int:
        return len(self.times_s)

    def select(self, chosen: npt.NDArray[np.int64]) -> TraceRows:
        """The rows at positions `chosen`; hashes are shared, not copied."""
        return TraceRows(
            times_s=self.times_s[chosen],
            input_lens=self.input_lens[chosen],
            output_lens=self.output_lens[chosen],
            hash_ids=self.hash_ids,
            hash_starts=None if self.hash_starts is None else self.hash_starts[chosen],
            dropped=self.dropped,
            notes=self.notes,
        )


class _Collector:
    """Grows the columns; drops and counts rows without prompt or output."""

    def __init__(self) -> None:
        self.times, self.inputs, self.outputs = array("q"), array("q"), array("q")
        self.hashes, self.hash_starts = array("q"), array("q")
        self.dropped: dict[str, int] = {}

    def add(self, time_ns: int, input_len: int, output_len: int) -> bool:
        for length, reason in ((input_len, "no prompt tokens"), (output_len, "no output tokens (failed request)")):
            if length == 0:
                self.dropped[reason] = self.dropped.get(reason, 0) + 1
                return False
        self.times.append(time_ns)
        self.inputs.append(input_len)
        self.outputs.append(output_len)
        return True

    def rows(self, path: Path) -> TraceRows:
        if not self.times:
            reasons = ", ".join(f"{count} × {reason}" for reason, count in self.dropped.items())
            raise UserError(f"{path}: no usable row" + (f" (dropped: {reasons})" if reasons else ""))
        times = np.array(self.times, dtype=np.int64)
        rows = TraceRows(
            times_s=(times - times.min()) / 1e9,
            input_lens=np.array(self.inputs, dtype=np.int64),
            output_lens=np.array(self.outputs, dtype=np.int64),
            dropped=self.dropped,
        )
        if self.hash_starts:
            starts = np.array(self.hash_starts, dtype=np.int64)
            rows.hash_ids = np.array(self.hashes, dtype=np.int64)
            rows.hash_starts = np.stack([starts, np.append(starts[1:], len(rows.hash_ids))], axis=1)
        if np.any(np.diff(times) < 0):
            rows = rows.select(np.argsort(times, kind="stable"))
            rows.notes = [*rows.notes, "rows were not in order of time and have been sorted"]
        return rows


def detect_format(path: Path) -> TraceFormat:
    """The format by the first line that is not blank: a CSV header or the keys of a JSON object."""
    number, line = next(((number, line) for number, line in iter_lines(path) if line.strip()), (1, ""))
    if line.lstrip().startswith("{"):
        row = parse_json_line(path, number, line)
        if EXPORT_KEY in row:
            return "jsonl"
        if "timestamp" in row and "input_length" in row:
            return "mooncake"
        found = f"keys {', '.join(list(row)[:8])}"
    else:
        columns = [cell.strip() for cell in line.split(",")]
        for format_, wanted in (("azure", AZURE_COLUMNS), ("burstgpt", BURSTGPT_COLUMNS)):
            if set(wanted) <= set(columns):
                return "azure" if format_ == "azure" else "burstgpt"
        found = f"columns {', '.join(columns[:8])[:120]}"
    raise UserError(
        f"{path}: line {number}: not a known trace ({found}); known: Azure CSV ({', '.join(AZURE_COLUMNS)}), BurstGPT "
        f"CSV ({', '.join(BURSTGPT_COLUMNS)}), Mooncake JSONL ({', '.join(MOONCAKE_KEYS)}), benchctl's own export"
    )


def read_rows(path: Path, format_: TraceFormat) -> TraceRows:
    """Read a public trace (`azure`, `mooncake`, `burstgpt`). Raises UserError naming line and column."""
    if format_ == "mooncake":
        return _read_mooncake(path)
    if format_ == "azure":
        return _read_csv(path, AZURE_COLUMNS, _azure_time_ns)
    return _read_csv(path, BURSTGPT_COLUMNS, _seconds_ns)


def _read_csv(path: Path, wanted: tuple[str, str, str], time_ns: Callable[[str], int | None]) -> TraceRows:
    collector = _Collector()
    positions: list[int] | None = None
    for line, cells in iter_csv(path):
        if positions is None:
            columns = [cell.strip() for cell in cells]
            missing = [column for column in wanted if column not in columns]
            if missing:
                raise UserError(
                    f"{path}: line {line}: no column {', '.join(missing)}; found {', '.join(columns[:10])[:160]}"
                )
            positions = [columns.index(column) for column in wanted]
            continue
        if len(cells) <= max(positions):
            raise UserError(f"{path}: line {line}: {len(cells)} cells, too few for column {wanted[-1]}")
        time_text, input_text, output_text = (cells[position] for position in positions)
        time = time_ns(time_text.strip())
        if time is None:
            raise UserError(f"{path}: line {line}: {wanted[0]} is not a time: {time_text[:40]!r}")
        collector.add(
            time,
            token_count(input_text, path=path, line=line, column=wanted[1]),
            token_count(output_text, path=path, line=line, column=wanted[2]),
        )
    return collector.rows(path)


def _azure_time_ns(text: str) -> int | None:
    """Nanoseconds since the epoch of e.g. `2023-11-16 18:15:46.6805900`; no time zone means UTC."""
    match = _DATETIME.fullmatch(text)
    if match is None:
        return None
    day, clock, fraction, zone = match.groups()
    try:
        moment = datetime.fromisoformat(f"{day}T{clock}" + (zone or "").replace("Z", "+00:00"))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = int(moment.timestamp())
    if not 0 <= seconds < 9.2e9:  # the limit of nanoseconds in 64 bits: the year 2262
        return None
    return seconds * 10**9 + int((fraction or "0").ljust(9, "0"))


def _seconds_ns(text: str) -> int | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return round(seconds * 1e9) if math.isfinite(seconds) and 0 <= seconds < 1e9 else None


def _read_mooncake(path: Path) -> TraceRows:
    collector = _Collector()
    for line, row in iter_jsonl(path):
        missing = [key for key in MOONCAKE_KEYS[:3] if key not in row]
        if missing:
            raise UserError(
                f"{path}: line {line}: no key {', '.join(missing)}; found {', '.join(list(row)[:10])[:160]}"
            )
        time_ms = row["timestamp"]
        if isinstance(time_ms, bool) or not isinstance(time_ms, int | float) or not 0 <= time_ms < 1e12:
            raise UserError(f"{path}: line {line}: timestamp is not milliseconds: {str(time_ms)[:40]!r}")
        input_len = token_count(row["input_length"], path=path, line=line, column="input_length")
        output_len = token_count(row["output_length"], path=path, line=line, column="output_length")
        hashes = _hash_ids(row.get("hash_ids", []), path, line)
        start = len(collector.hashes)
        if collector.add(round(time_ms * 1e6), input_len, output_len):
            collector.hash_starts.append(start)
            collector.hashes.extend(hashes)
    return collector.rows(path)


def _hash_ids(value: Any, path: Path, line: int) -> list[int]:
    if not isinstance(value, list) or not all(
        isinstance(item, int) and not isinstance(item, bool) and -(2**63) <= item < 2**63 for item in value
    ):
        raise UserError(f"{path}: line {line}: hash_ids is not a list of 64-bit integers")
    return value
