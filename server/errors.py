"""Errors that a user can mend."""

from __future__ import annotations


class UserError(Exception):
    """Bad input or an impossible request: one line that says what, where and how to mend it.

    Commands print it without a traceback and exit with `exit_code` (2: usage or bad input). Messages quote names out
    of files that strangers wrote: control characters (line ends, terminal escapes) and halves of surrogate pairs are
    shown as Python escapes.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(message if message.isprintable() else _printable(message))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
