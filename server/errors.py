"""Errors that a user can mend."""

from __future__ import annotations


class UserError(Exception):
    """Bad input or an impossible request: one line that says what, where and how to mend it.

    Commands print it without a traceback and exit with `exit_code` (2: usage or bad input).
    """

    exit_code = 2
