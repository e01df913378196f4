"""A suite as a file that both sides of a gate read, so that they do the same work."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchctl.matrix.suite import suite_text
from reports.results import write_text
from server.errors import UserError

_GATE_HEADER = re.compile(r"\s*\[\s*gate\s*(\.[^\]]*)?\]\s*(#.*)?")
_HEADER = re.compile(r"\s*\[")


def write_portable_suite(name_or_file: str, directory: Path) -> Path:
    """Write the suite without its `[gate]` table into `directory`; the file.

    A shipped suite may differ between revisions, and an older revision may not know `[gate]`. Raises UserError: no
    such suite, or a `[gate]` table that cannot be told from the rest.
    """
    where, text = suite_text(name_or_file)
    kept, inside = [], False
    for line in text.splitlines():
        if _GATE_HEADER.fullmatch(line):
            inside = True
        elif _HEADER.match(line):
            inside = False
        if not inside:
            kept.append(line)
    portable = "\n".join(kept) + "\n"
    wanted = tomllib.loads(text)
    wanted.pop("gate", None)
    if tomllib.loads(portable) != wanted:
        raise UserError(f"{where}: write the gate's settings as a table of their own: [gate] at the end of the file")
    return write_text(directory / f"{Path(name_or_file).stem}.toml", portable)


def without_gate(assignments: Sequence[str]) -> list[str]:
    """The `--set` assignments that concern the measurement and not the gate."""
    return [text for text in assignments if text.strip().partition("=")[0].strip().split(".")[0] != "gate"]
