"""Result files: written whole or not at all, read back with a check of their schema version."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from reports.schema import SCHEMA_VERSION, CellResult, MatrixIndex
from server.errors import UserError

INDEX_NAME = "matrix.json"
T = TypeVar("T", CellResult, MatrixIndex)
# Control characters in JSON text, which can hold those below U+0020 as escapes only: as text of a result they would
# reach a terminal. A backslash that is itself escaped is matched to be left alone.
_CONTROLS = re.compile(rb"\\\\|\\u00(?:[01][0-9A-Fa-f]|7[fF]|[89][0-9A-Fa-f])|\x7f|\xc2[\x80-\x9f]")


class _Versioned(msgspec.Struct):
    schema_version: str


def result_name(cell_id: str) -> str:
    """File name of a cell's result: readable, safe, and unique even where two ids differ in odd characters only."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", cell_id.replace("/", "__")).strip("._")[:120]
    return f"{readable}-{hashlib.sha256(cell_id.encode()).hexdigest()[:8]}.json"


def write_result(result: CellResult, path: Path) -> Path:
    """Write one result as indented JSON to `path` (a directory: under `result_name`); returns the file.

    Raises UserError when the file cannot be written (disk full, read-only, no such directory).
    """
    if path.is_dir():
        path = path / result_name(result.cell_id)
    return _write(result, path)


def write_index(index: MatrixIndex, directory: Path) -> Path:
    """Write `matrix.json`; raises UserError as `write_result` does."""
    return _write(index, directory / INDEX_NAME)


def read_result(path: Path) -> CellResult:
    """Read one result. Raises UserError: not there, broken JSON, not a result, another schema version."""
    return _read(path, CellResult)


def read_index(directory: Path) -> MatrixIndex:
    """Read `matrix.json` of a result directory; raises UserError as `read_result` does."""
    return _read(directory / INDEX_NAME, MatrixIndex)


def write_text(path: Path, text: str) -> Path:
    """Write a report atomically; raises UserError as `write_result` does."""
    return write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> Path:
    """Replace `path` by `data` through a temporary file beside it, so that no reader sees half of it.

    What is no file to be replaced (`cannot_be_replaced`) is written to as it is.
    """
    temporary: str | None = None
    try:
        if cannot_be_replaced(path):
            path.write_bytes(data)
            return path
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:60]}-", dir=path.parent)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise UserError(explain_os_error(path, error)) from error
        raise
    return path


def cannot_be_replaced(path: Path) -> bool:
    """Whether `path` is a device, a pipe or a stream of this process (/dev/stdout): another file in its place would
    destroy it.
    """
    streams = path.parent in (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
    return path.exists() and (streams or not path.is_file())


def explain_os_error(path: Path, error: OSError) -> str:
    """One line about a file that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{path}: the disk is full; results written before are kept: free some space and run it again "
            "(`benchctl matrix` goes on with --resume)"
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{path}: is not a directory, or lies below a file; choose another directory with --output"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path}: cannot be written ({error.strerror}); choose another directory with --output"
    return f"{path}: {error.strerror or error}"


def _write(document: CellResult | MatrixIndex, path: Path) -> Path:
    return write_bytes(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _read(path: Path, kind: type[T]) -> T:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    data = _CONTROLS.sub(_replace_control, data)
    try:
        version = msgspec.json.decode(data, type=_Versioned).schema_version
    except msgspec.ValidationError:
        raise UserError(f"{path}: not a benchctl result (no schema_version)") from None
    except msgspec.DecodeError:
        raise UserError(f"{path}: {_where_broken(data)}") from None
    if version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise UserError(
            f"{path}: has schema version {version}, this benchctl reads {SCHEMA_VERSION.split('.')[0]}.x; "
            "run the measurement again or use the benchctl that wrote it"
        )
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: not a valid {kind.__name__}: {error}") from None


def _replace_control(match: re.Match[bytes]) -> bytes:
    found = match.group()
    return found if found == rb"\\" else rb"\ufffd"


def _where_broken(data: bytes) -> str:
    try:
        json.loads(data)
    except json.JSONDecodeError as error:
        return f"broken JSON in line {error.lineno}, column {error.colno}: {error.msg}"
    except UnicodeDecodeError as error:
        return f"broken JSON: invalid UTF-8 at byte {error.start}"
    return "broken JSON"
