"""Where the history is kept: a directory of JSON lines that merges in git, or one SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from benchctl.history.record import RECORD_VERSION, Record
from reports.results import explain_os_error, write_bytes
from server.errors import UserError

_SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")


class Store(Protocol):
    def add(self, records: Iterable[Record]) -> int:
        """Add what is not there yet; how many were new. Raises UserError when the store cannot be written."""

    def read(self) -> list[Record]:
        """All records in the order of their commits. Raises UserError for a store that is not there or broken."""


def open_store(path: Path) -> Store:
    """The store at `path`: SQLite for a file named `.db`, `.sqlite` or `.sqlite3`, else a directory."""
    if path.suffix in _SQLITE_SUFFIXES:
        return SqliteStore(path)
    if path.is_file():
        raise UserError(f"{path}: is a file; a history is a directory, or a file that ends in .db")
    return JsonlStore(path)


class JsonlStore:
    """A file per commit, `DATE-COMMIT.jsonl`, with a line per measured cell in a fixed order.

    Two branches that measure different commits touch different files, and adding to a commit only adds lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, records: Iterable[Record]) -> int:
        by_file: dict[str, list[Record]] = {}
        for record in records:
            day = record.order[0][:10]
            by_file.setdefault(f"{day}-{record.commit[:12]}.jsonl", []).append(record)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(explain_os_error(self.path, error)) from error
        added = 0
        for name, new in by_file.items():
            there = _read_lines(self.path / name) if (self.path / name).is_file() else []
            merged = {record.id: record for record in [*there, *new]}
            added += len(merged) - len({record.id for record in there})
            lines = sorted(merged.values(), key=lambda record: (record.cell_id, record.measured_at, record.id))
            data = b"".join(msgspec.json.encode(record, order="deterministic") + b"\n" for record in lines)
            write_bytes(self.path / name, data)
        return added

    def read(self) -> list[Record]:
        if not self.path.is_dir():
            raise _missing(self.path)
        records = [record for file in sorted(self.path.glob("*.jsonl")) for record in _read_lines(file)]
        return sorted({record.id: record for record in records}.values(), key=lambda record: record.order)


class SqliteStore:
    """One table `records`; the columns are for queries, `record` holds the JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, records: Iterable[Record]) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(explain_os_error(self.path, error)) from error
        with self._connection() as connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS records (id TEXT PRIMARY KEY, commit_hash TEXT NOT NULL, "
                "cell_id TEXT NOT NULL, measured_at TEXT NOT NULL, record TEXT NOT NULL)"
            )
            before = connection.total_changes
            connection.executemany(
                "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?)",
                [(r.id, r.commit, r.cell_id, r.measured_at, msgspec.json.encode(r).decode()) for r in records],
            )
            return connection.total_changes - before

    def read(self) -> list[Record]:
        if not self.path.is_file():
            raise _missing(self.path)
        with self._connection() as connection:
            rows = connection.execute("SELECT record FROM records").fetchall()
        records = [_decode(text.encode(), str(self.path)) for (text,) in rows]
        return sorted(records, key=lambda record: record.order)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=30)) as connection, connection:
                yield connection
        except sqlite3.Error as error:
            raise UserError(f"{self.path}: SQLite: {error}") from None


def _missing(path: Path) -> UserError:
    return UserError(f"{path}: no such history; `benchctl history add RESULTS --store {path}` makes one")


def _read_lines(file: Path) -> list[Record]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    return [_decode(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _decode(data: bytes, where: str) -> Record:
    try:
        record = msgspec.json.decode(data, type=Record)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: not a history record: {error}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{where}{_column_of_error(data)}: broken JSON: {error}") from None
    if record.record_version.split(".")[0] != RECORD_VERSION.split(".")[0]:
        raise UserError(f"{where}: has record version {record.record_version}, this benchctl reads {RECORD_VERSION}")
    return record


def _column_of_error(data: bytes) -> str:
    try:
        json.loads(data)
    except json.JSONDecodeError as error:
        return f", column {error.colno}"
    except UnicodeDecodeError as error:
        return f", byte {error.start + 1}"
    return ""
