"""Git revisions as source trees: temporary worktrees, with an environment of their own where dependencies differ."""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
import site
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchctl.nvml import describe_gpus
from server.errors import UserError


def repository_root(directory: Path) -> Path:
    """The top of the git checkout around `directory`. Raises UserError outside of one."""
    top = _git(directory, "rev-parse", "--show-toplevel")
    if top is None:
        raise UserError(f"{directory}: not inside a git checkout, which --base-rev and --candidate-rev need")
    return Path(top)


def resolve_revision(repository: Path, revision: str, flag: str) -> str:
    """The commit that a revision names. Raises UserError when there is none."""
    commit = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        shallow = _git(repository, "rev-parse", "--is-shallow-repository") == "true"
        hint = "the clone is shallow: fetch the whole history (fetch-depth: 0)" if shallow else "git fetch may help"
        raise UserError(f"{flag} {revision!r}: no such commit in {repository}; {hint}")
    return commit


@contextlib.contextmanager
def worktree(repository: Path, commit: str) -> Iterator[Path]:
    """A detached worktree of `commit` in a temporary folder, removed at the end.

    Raises UserError when git cannot make one (disk full, a missing object).
    """
    folder = Path(tempfile.mkdtemp(prefix="benchctl-gate-"))
    tree = folder / commit[:12]
    try:
        command = ["git", "-C", str(repository), "worktree", "add", "--quiet", "--detach", str(tree), commit]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UserError(f"git worktree of {commit[:12]}: {_last_line(done.stderr)}")
        yield tree
    finally:
        subprocess.run(
            ["git", "-C", str(repository), "worktree", "remove", "--force", str(tree)], capture_output=True, check=False
        )
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def interpreter(tree: Path, reference: Path) -> Iterator[str]:
    """A Python that has what `tree` depends on: this one when `reference` depends on the same, else a new venv.

    The new environment falls back to this one's packages, so that only what differs is installed. Raises UserError
    when pip cannot install it.
    """
    wanted = requirements(tree)
    if wanted == requirements(reference):
        yield sys.executable
        return
    with tempfile.TemporaryDirectory(prefix="benchctl-gate-venv-") as folder:
        # The pip that is here installs into the new environment; bootstrapping another one takes seconds.
        has_pip = _has_pip()
        venv.create(folder, with_pip=not has_pip, symlinks=True)
        python = str(Path(folder) / "bin" / "python")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        fallback = Path(folder) / "lib" / version / "site-packages" / "zz_fallback.pth"
        fallback.write_text("".join(f"{path}\n" for path in site.getsitepackages()))
        pip = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
        extra = wanted["gpu"] if describe_gpus() else []
        command = [*pip, "install", "--quiet", "--disable-pip-version-check", *wanted["dependencies"], *extra]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UserError(f"environment for {tree.name}: pip install failed: {_last_line(done.stderr)}")
        yield python


def _has_pip() -> bool:
    # Not by looking for the module: with some versions of setuptools that warns or ends in an error.
    try:
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def requirements(tree: Path) -> dict[str, Any]:
    """What a tree's `pyproject.toml` asks to be installed. Raises UserError when it cannot be read."""
    path = tree / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    return {
        "dependencies": sorted(project.get("dependencies", [])),
        "gpu": sorted(project.get("optional-dependencies", {}).get("gpu", [])),
    }


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")
