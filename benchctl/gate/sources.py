"""What is measured on one side of a gate: a checkout of benchctl, or any command that writes results."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from reports.verdict import SideInfo
from server.errors import UserError

PACKAGES = ("benchctl", "server", "workloads", "reports")


@dataclass(frozen=True, slots=True)
class Invocation:
    """How one run is started."""

    argv: list[str]
    env: dict[str, str]


class Source(Protocol):
    """One side of the comparison."""

    @property
    def info(self) -> SideInfo: ...

    @property
    def commit(self) -> str | None:
        """The commit that its results must name; None: not known beforehand."""

    def invocation(self, output: Path) -> Invocation:
        """The command that measures this side once and writes its results into `output`."""


@dataclass(slots=True)
class CommandSource:
    """A command line with `{output}` where the directory for the results goes."""

    text: str
    flag: str
    commit: str | None = None

    def __post_init__(self) -> None:
        if "{output}" not in self.text:
            raise UserError(
                f"{self.flag} {self.text!r}: has no {{output}}; write it where the result directory goes, e.g. "
                f"{self.flag} 'benchctl matrix --suite quick --output {{output}}'"
            )
        try:
            parts = shlex.split(self.text)
        except ValueError as error:
            raise UserError(f"{self.flag} {self.text!r}: {error}") from None
        if not parts:
            raise UserError(f"{self.flag}: is empty")

    @property
    def info(self) -> SideInfo:
        return SideInfo(label=self.text)

    def invocation(self, output: Path) -> Invocation:
        argv = [part.replace("{output}", str(output)) for part in shlex.split(self.text)]
        return Invocation(argv, dict(os.environ))


@dataclass(slots=True)
class CheckoutSource:
    """A source tree of benchctl, run by `python` (which has its dependencies) through `benchctl matrix`."""

    path: Path
    suite: Path
    label: str
    assignments: Sequence[str] = ()
    python: str = sys.executable
    commit: str | None = None
    dirty: bool | None = field(default=None)

    @property
    def info(self) -> SideInfo:
        return SideInfo(label=self.label, git_commit=self.commit, git_dirty=self.dirty)

    def invocation(self, output: Path) -> Invocation:
        argv = [self.python, "-m", "benchctl", "matrix", "--suite", str(self.suite), "--output", str(output)]
        for assignment in self.assignments:
            argv += ["--set", assignment]
        return Invocation(argv, self._environment())

    def prepare(self) -> None:
        """Compile the tree's modules, so that the first run starts no slower than the others."""
        folders = [str(self.path / name) for name in PACKAGES if (self.path / name).is_dir()]
        # A tree that may not be written to is compiled at every start, on either side.
        subprocess.run([self.python, "-m", "compileall", "-qq", *folders], capture_output=True, check=False)

    def _environment(self) -> dict[str, str]:
        # The tree comes before every installed copy. PYTHONSAFEPATH keeps the current directory, which is often a
        # checkout too, out of the way, in the servers that the run starts as well.
        rest = os.environ.get("PYTHONPATH")
        path = f"{self.path}{os.pathsep}{rest}" if rest else str(self.path)
        return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def is_checkout(path: Path) -> bool:
    """Whether `path` is a source tree of benchctl (and not a directory of results)."""
    return (path / "benchctl" / "__main__.py").is_file()


def require_checkout(path: Path, where: str) -> Path:
    """The absolute path. Raises UserError when it is no source tree of benchctl."""
    if not is_checkout(path):
        raise UserError(
            f"{where}: {path} is no benchctl source tree (no benchctl/__main__.py); to gate something else give "
            "--base-command and --candidate-command"
        )
    return path.resolve()
