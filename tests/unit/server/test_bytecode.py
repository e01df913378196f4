"""Bytecode that is kept for installed packages which have none."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from server import byte_compile, bytecode
from server.bytecode import COMPLETE, ByteCompiler, child_environment, choose_folder, wants_compiling
from server.config import ServerConfig
from server.startup import join_timeline
from server.supervisor import Supervisor
from server.timeline import Timeline


@pytest.fixture
def torch_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch without bytecode, in a process that writes none."""
    package = tmp_path / "site-packages" / "torch"
    package.mkdir(parents=True)
    source = package / "__init__.py"
    source.write_text("")
    (package / "version.py").write_text("__version__ = '1'")
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(source), is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    return source


def test_a_private_folder_is_made_for_packages_without_bytecode(torch_source: Path, tmp_path: Path) -> None:
    folder, warning = choose_folder(tmp_path / "cache")
    assert folder is not None
    assert warning is None
    assert folder.parent == tmp_path / "cache" / "bytecode"
    for path in (folder, folder.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    torch_source.with_name("version.py").write_text("__version__ = '2'")
    other, _ = choose_folder(tmp_path / "cache")
    assert other not in (None, folder), "two versions of torch share a folder"


def test_nothing_is_done_with_bytecode_beside_the_package(torch_source: Path, tmp_path: Path) -> None:
    compiled = Path(importlib.util.cache_from_source(str(torch_source)))
    compiled.parent.mkdir()
    compiled.write_bytes(b"")
    assert choose_folder(tmp_path / "cache") == (None, None)
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("torch_source")
def test_nothing_is_done_where_python_will_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    assert choose_folder(tmp_path / "cache") == (None, None)


@pytest.mark.usefixtures("torch_source")
def test_a_folder_of_the_users_own_is_left_to_him(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "mine"))
    assert choose_folder(tmp_path / "cache") == (None, None)


@pytest.mark.usefixtures("torch_source")
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_folder_that_others_can_enter_is_not_used(mode: int, tmp_path: Path) -> None:
    root = tmp_path / "cache" / "bytecode"
    root.mkdir(parents=True)
    root.chmod(mode)
    folder, warning = choose_folder(tmp_path / "cache")
    assert folder is None
    assert warning is not None
    assert str(root) in warning


@pytest.mark.usefixtures("torch_source")
def test_links_and_files_in_its_place_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root = tmp_path / "cache" / "bytecode"
    root.symlink_to(tmp_path / "elsewhere")
    folder, warning = choose_folder(tmp_path / "cache")
    assert folder is None
    assert warning is not None
    assert "it is a symbolic link, and links in the cache are not followed: remove it" in warning
    assert list((tmp_path / "elsewhere").iterdir()) == []
    root.unlink()
    root.write_text("")
    folder, warning = choose_folder(tmp_path / "cache")
    assert folder is None
    assert warning is not None


def test_children_write_bytecode_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = child_environment(tmp_path / "b")
    assert environment["PYTHONPYCACHEPREFIX"] == str(tmp_path / "b")
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert environment["PATH"] == os.environ["PATH"]


def test_sources_are_python_of_the_packages_without_their_tests() -> None:
    found = [path.as_posix() for path in byte_compile.sources(("server", "no_such_package", "typing_extensions"))]
    assert any(path.endswith("server/worker/worker.py") for path in found)
    assert any(path.endswith("/asyncio/events.py") for path in found)
    assert found[-1].endswith("typing_extensions.py")
    assert not any("/tests/" in path or "/site-packages/" in path for path in found[:1000] if "asyncio" in path)


def compile_ahead(folder: Path, files: list[Path], processes: int = 2) -> int:
    code = (
        "import sys; from pathlib import Path; import server.byte_compile as b\n"
        f"b.sources = lambda: map(Path, {[str(file) for file in files]!r})\n"
        "sys.exit(b.main())"
    )
    arguments = [str(folder), str(processes), str(os.getpid())]
    return subprocess.run([sys.executable, "-c", code, *arguments], timeout=60, check=False).returncode


def test_bytecode_is_found_by_the_import_that_follows(tmp_path: Path) -> None:
    package, folder = tmp_path / "package", tmp_path / "bytecode"
    package.mkdir()
    folder.mkdir()
    names = [f"module_{number}" for number in range(5)]
    for name in names:
        (package / f"{name}.py").write_text("value = 1")
    (package / "template.py").write_text("{{ this is no Python }}")
    assert wants_compiling(folder)
    assert compile_ahead(folder, sorted(package.iterdir())) == 0
    assert not wants_compiling(folder)
    assert sorted(path.name.partition(".")[0] for path in folder.rglob("*.pyc")) == names
    done = subprocess.run(
        [sys.executable, "-v", "-c", "import module_3"],
        env=child_environment(folder) | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"matches {package}/module_3.py" in done.stderr


def test_what_is_there_is_not_compiled_again(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("value = 1")
    compiled = Path(importlib.util.cache_from_source(str(source)))
    compiled.parent.mkdir(parents=True)
    compiled.write_bytes(b"kept")
    byte_compile.compile_files([source])
    assert compiled.read_bytes() == b"kept"


def test_without_room_the_compiler_gives_up_and_will_try_again(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("value = 1")
    (tmp_path / "file").write_text("")
    assert compile_ahead(tmp_path / "file", [source]) == 1
    assert wants_compiling(tmp_path / "file")


def test_the_compiler_ends_when_it_is_closed(tmp_path: Path) -> None:
    compiler = ByteCompiler(tmp_path)
    pid = compiler._popen.pid
    compiler.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert wants_compiling(tmp_path)


class _Observer:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_stderr(self, process: str, line: str) -> None:
        self.lines.append(line)


def test_the_supervisor_notes_how_long_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.supervisor.choose_folder", lambda root: (tmp_path, None))
    observer = _Observer()
    supervisor = Supervisor(ServerConfig(), observer, Timeline("supervisor"))  # type: ignore[arg-type]
    environment = supervisor._keep_bytecode()
    assert environment is not None
    assert environment["PYTHONPYCACHEPREFIX"] == str(tmp_path)
    supervisor._on_byte_compiled()
    (span,) = supervisor.timeline.spans
    assert span.name == "bytecode"
    assert join_timeline([span], span.start_ns, span.end_ns).unaccounted_ns == span.end_ns - span.start_ns
    (tmp_path / COMPLETE).touch()
    supervisor._keep_bytecode()
    assert supervisor._byte_compiler is None


def test_the_supervisor_goes_on_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.supervisor.choose_folder", lambda root: (None, "not trusted"))
    observer = _Observer()
    supervisor = Supervisor(ServerConfig(), observer, Timeline("supervisor"))  # type: ignore[arg-type]
    assert supervisor._keep_bytecode() is None
    assert observer.lines == ["not trusted"]


def test_the_cache_commands_know_it(tmp_path: Path) -> None:
    from server.compilation.kernels import bytecode_cache, clear_bytecode_cache

    assert bytecode_cache(str(tmp_path)) is None
    assert clear_bytecode_cache(str(tmp_path)) == (0, 0)
    folder = bytecode.bytecode_root(tmp_path) / "cpython" / "usr"
    folder.mkdir(parents=True)
    (folder / "module.pyc").write_bytes(b"12345")
    info = bytecode_cache(str(tmp_path))
    assert info is not None
    assert (info.files, info.bytes) == (1, 5)
    assert clear_bytecode_cache(str(tmp_path)) == (1, 5)
    assert bytecode_cache(str(tmp_path)) is None
