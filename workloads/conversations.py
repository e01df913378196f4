"""ShareGPT's JSON schema in the spellings that are about: turns out of rows, whatever their keys are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from server.errors import UserError
from workloads.base import Message
from workloads.files import check_surrogates, iter_lines, parse_json_line, read_json_array

_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}


class ConversationFile:
    """A ShareGPT file whose conversations are decoded one at a time, in any order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[msgspec.Raw] | list[tuple[int, str]]
        if _starts_with_bracket(path):
            self._rows = read_json_array(path)
        else:
            self._rows = [(number, line) for number, line in iter_lines(path) if line.strip()]

    def __len__(self) -> int:
        return len(self._rows)

    def turns(self, position: int) -> list[Message]:
        """Messages of the conversation at `position`, roles mapped to user, assistant and system.

        Raises:
            UserError: the element has not the schema; names the element (from 1) and the key.
        """
        where = f"{self.path}: conversation {position + 1}"
        row: Any = self._rows[position]
        if isinstance(row, msgspec.Raw):
            try:
                row = msgspec.json.decode(row)
            except msgspec.DecodeError as error:
                raise UserError(f"{where}: {error}") from None
        else:
            row = parse_json_line(self.path, *row)
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected an object with `conversations`, got {type(row).__name__}")
        found = next((row[key] for key in ("conversations", "conversation", "messages") if key in row), None)
        if found is None:
            keys = ", ".join(list(row)[:6]) or "none"
            raise UserError(f"{where}: neither `conversations` nor `conversation` among its keys ({keys})")
        found = _unwrap(found, where)
        if not isinstance(found, list):
            raise UserError(f"{where}: `conversations` is {type(found).__name__}, not a list of turns")
        return [_turn(turn, f"{where}, turn {number}") for number, turn in enumerate(found, start=1)]


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _unwrap(value: Any, where: str) -> Any:
    """A value that may be JSON inside a string."""
    if not isinstance(value, str):
        return value
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: a turn is text but not JSON ({error})") from None
    check_surrogates(value, decoded, where=where)
    return decoded


def _turn(raw: Any, where: str) -> Message:
    turn = _unwrap(raw, where)
    if not isinstance(turn, dict):
        raise UserError(f"{where}: expected an object with `from` and `value`, got {type(turn).__name__}")
    speaker = turn.get("from", turn.get("role"))
    text = turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise UserError(f"{where}: needs text under `from` and `value` (or `role` and `content`)")
    # A speaker that is none of these (a tool, say) is kept under its own name; the builder drops what it cannot use.
    return Message(role=_ROLES.get(speaker.lower(), speaker), content=text)
