"""Reading data files that strangers wrote: every failure is one line with file, line and column."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from server.errors import UserError
from workloads.lengths import MAX_TOKENS

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_CHECK_BYTES = 1 << 20
# Escapes in JSON text: a backslash itself, a whole surrogate pair, or half of one.
_SURROGATES = re.compile(r"\\\\|(?P<pair>\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|(?P<half>\\u[dD][89a-fA-F]..)")


def open_data(path_text: str, *, where: str) -> Path:
    """The path of a readable, non-empty, uncompressed regular file, or UserError."""
    path = Path(path_text).expanduser()
    try:
        if path.is_dir():
            raise UserError(f"{where}: {path} is a folder; name a file in it")
        with path.open("rb") as file:
            head = file.read(2)
    except OSError as error:
        raise UserError(f"{where}: cannot read {path}: {error.strerror}") from None
    if head.startswith(_GZIP_MAGIC):
        raise UserError(f"{where}: {path} is compressed with gzip; decompress it first")
    if not head:
        raise UserError(f"{where}: {path} is empty")
    return path


def iter_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line number from 1 and text without its line end, a byte order mark removed; one line in memory at a time."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1 and raw.startswith(_BOM):
                raw = raw[len(_BOM) :]
            try:
                yield number, raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: line {number}, byte {error.start + 1}: not UTF-8; convert the file first"
                ) from None


def iter_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line that is not blank."""
    for number, line in iter_lines(path):
        if line.strip():
            yield number, parse_json_line(path, number, line)


def parse_json_line(path: Path, number: int, line: str) -> dict[str, Any]:
    """The object on one line, or UserError with line and column."""
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {number}, column {error.colno}: broken JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: line {number}: broken JSON ({error})") from None
    check_surrogates(line, value, where=f"{path}: line {number}")
    if not isinstance(value, dict):
        raise UserError(f"{path}: line {number}: expected a JSON object, got {type(value).__name__}")
    return value


def check_surrogates(text: str, value: Any, *, where: str) -> None:
    """Raise UserError when `value`, decoded from the JSON `text`, holds half a surrogate pair: no server takes it."""
    if "\\ud" not in text and "\\uD" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is not text") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def read_json_array(path: Path) -> list[msgspec.Raw]:
    """The elements of the JSON array in a file, not yet decoded: views into one buffer of the file's size."""
    data = path.read_bytes().removeprefix(_BOM)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        # Undecoded elements are not checked for UTF-8; in pieces, so that no second copy of the file is made.
        for start in range(0, len(data), _CHECK_BYTES):
            decoder.decode(data[start : start + _CHECK_BYTES])
        elements: list[msgspec.Raw] = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        explain_broken_json(path, data, error)
    return elements


def explain_broken_json(path: Path, data: bytes, error: Exception, *, first_line: int = 1) -> NoReturn:
    """Raise the UserError that says where `data`, which begins on line `first_line`, stops being JSON."""
    try:
        text = data.decode("utf-8")
        json.loads(text, parse_constant=_refuse_constant)
        position = next((match.start() for match in _SURROGATES.finditer(text) if match.lastgroup == "half"), None)
    except UnicodeDecodeError as broken:
        line = data.count(b"\n", 0, broken.start) + first_line
        column = broken.start - data.rfind(b"\n", 0, broken.start)
        raise UserError(f"{path}: line {line}, byte {column}: not UTF-8; convert the file first") from None
    except json.JSONDecodeError as broken:
        raise UserError(
            f"{path}: line {broken.lineno + first_line - 1}, column {broken.colno}: broken JSON ({broken.msg})"
        ) from None
    except (ValueError, RecursionError) as broken:
        raise UserError(f"{path}: broken JSON ({broken})") from None
    if position is not None:
        line = text.count("\n", 0, position) + first_line
        column = position - text.rfind("\n", 0, position)
        raise UserError(f"{path}: line {line}, column {column}: half of a surrogate pair, which is not text")
    raise UserError(f"{path}: {error}")


def iter_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row that is not blank, the header included."""
    lines = iter_lines(path)
    current = 0

    def texts() -> Iterator[str]:
        nonlocal current
        for number, text in lines:
            current = number
            yield text

    try:
        for row in csv.reader(texts(), strict=True):
            if row:
                yield current, row
    except csv.Error as error:
        raise UserError(f"{path}: line {current}: broken CSV ({error})") from None


def token_count(value: Any, *, path: Path, line: int, column: str) -> int:
    """`value` (text or number) as a whole number from 0 to `MAX_TOKENS`, or UserError that names line and column."""
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    elif isinstance(value, str):
        text = value.strip()
        try:
            number = int(text)
        except ValueError:
            number = None
    if number is None:
        raise UserError(f"{path}: line {line}: {column} is not a whole number: {str(value)[:40]!r}")
    if number < 0:
        raise UserError(f"{path}: line {line}: {column} is negative: {number}")
    if number > MAX_TOKENS:
        raise UserError(f"{path}: line {line}: {column} is above {MAX_TOKENS}: {str(number)[:40]}")
    return number
