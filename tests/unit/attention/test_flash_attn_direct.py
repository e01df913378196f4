"""Keeping flash-attn-4's compiled function: linked once, found again by all that it depends on, never fatal."""

from __future__ import annotations

import ctypes
import importlib.machinery
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from server.attention import flash_attn_cute, flash_attn_direct
from server.attention.base import AttentionSpec

SPEC = AttentionSpec(torch.device("cpu"), torch.bfloat16, 32, 8, 128, 64)


class _Cache:
    """The package's disk cache with one compiled function."""

    def __init__(self, directory: Path) -> None:
        self.cache_path = directory
        source = directory / "answer.c"
        source.write_text("int func(void) { return 42; }")
        subprocess.run(["cc", "-c", "-fPIC", str(source), "-o", str(directory / "hash-of-key.o")], check=True)

    def _key_to_hash(self, key: str) -> str:
        return f"hash-of-{key}"


class _Module:
    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def __getitem__(self, name: str) -> object:
        return getattr(self._library, name)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with flash-attn-4 installed, as far as this module looks."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "interface.py").write_text("version = 1")
    origin = importlib.machinery.ModuleSpec("flash_attn.cute", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(flash_attn_direct.importlib.util, "find_spec", lambda _: origin)
    monkeypatch.setattr(flash_attn_direct.metadata, "version", lambda _: "1.0")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    )
    runtime = ModuleType("cutlass.cute.runtime")
    runtime.find_runtime_libraries = lambda enable_tvm_ffi: []  # type: ignore[attr-defined]
    ffi = ModuleType("tvm_ffi")
    ffi.load_module = _Module  # type: ignore[attr-defined]
    for name, module in (("cutlass", ModuleType("cutlass")), ("cutlass.cute", ModuleType("cutlass.cute"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "cutlass.cute.runtime", runtime)
    monkeypatch.setitem(sys.modules, "tvm_ffi", ffi)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_a_stored_function_is_loaded(package: Path, tmp_path: Path) -> None:
    path = flash_attn_direct.library_path(SPEC)
    assert path is not None
    assert flash_attn_direct.load(path) is None
    flash_attn_direct.store(path, _Cache(tmp_path), "key")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert flash_attn_direct.load(path)() == 42


def test_the_name_depends_on_shape_and_package(package: Path) -> None:
    names = {flash_attn_direct.library_path(SPEC)}
    other = AttentionSpec(torch.device("cpu"), torch.bfloat16, 32, 8, 128, 128)
    names.add(flash_attn_direct.library_path(other))
    (package / "interface.py").write_text("version = 2, edited in place")
    names.add(flash_attn_direct.library_path(SPEC))
    assert len(names) == 3


def test_no_cache_directory_means_no_library(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    assert flash_attn_direct.library_path(SPEC) is None
    assert flash_attn_direct.load(None) is None


def test_a_damaged_library_and_a_missing_object_are_worth_a_warning(
    package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = flash_attn_direct.library_path(SPEC)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x7fELF truncated")
    assert flash_attn_direct.load(path) is None
    assert "flash-attn-4 is imported instead" in caplog.text
    path.unlink()
    flash_attn_direct.store(path, _Cache(tmp_path), "another key")
    assert not path.exists()
    assert "is not kept for the next start" in caplog.text


def hopper(monkeypatch: pytest.MonkeyPatch, command: str) -> flash_attn_cute.CuteForward:
    """The backend's way to flash-attn-4 on a cold start whose compiling process runs `command`."""

    def start(spec: AttentionSpec, path: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["/bin/sh", "-c", command, "sh", str(path)], stderr=subprocess.PIPE)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flash_attn_cute.flash_attn_build, "start", start)
    return flash_attn_cute.CuteForward(SPEC)


def test_a_cold_start_waits_for_the_process_that_compiles(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "answer.c"
    source.write_text("int func(void) { return 42; }")
    forward = hopper(monkeypatch, f'mkdir -p "$(dirname "$1")" && cc -shared -fPIC {source} -o "$1"')
    assert forward.is_built()
    assert forward._kept() == 42
    assert hopper(monkeypatch, "exit 1").is_built()  # the next start finds it and starts no process


def test_a_failed_process_is_reported_and_made_up_for(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = hopper(monkeypatch, "echo first >&2; echo no such architecture >&2; exit 1")
    assert not forward.is_built()
    assert not forward.is_built()
    assert caplog.text.count("another one failed: no such architecture") == 1
