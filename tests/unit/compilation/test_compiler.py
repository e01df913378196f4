"""From the cache or compiled: warm starts, two servers at once, entries that cannot be used, disks that are full."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._dynamo import utils

from server.compilation import compiler as module
from server.compilation.compiler import CompiledModel, ModelCompiler
from server.compilation.store import CompileCache
from server.errors import UserError
from server.forward_context import ForwardContext, set_forward_context
from tests.unit.compilation.conftest import Compiled
from tests.unit.compilation.models import make_compiler


class _CompiledNow(Exception):
    """Raised in the place of compiling."""


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_now(_: ModelCompiler) -> CompiledModel:
        raise _CompiledNow

    monkeypatch.setattr(ModelCompiler, "_compile", compile_now)


@pytest.fixture
def copy(compiled: Compiled, tmp_path: Path) -> Path:
    """A cache of its own with the compiled model's entry."""
    shutil.copytree(compiled.cache, tmp_path / "cache", ignore=shutil.ignore_patterns(".locks"))
    return tmp_path / "cache"


def entry_of(compiled: Compiled, cache: Path) -> Path:
    return cache / compiled.compiler.key


def run(compiled: Compiled, compiler: ModelCompiler) -> torch.Tensor:
    ids = torch.arange(11)
    with torch.inference_mode(), set_forward_context(ForwardContext(None, compiled.model.attention_layers())):
        return compiler.compiled.bind()(ids, ids)


def test_loops_between_products_run_on_one_thread(compiled: Compiled) -> None:
    sources = list((entry_of(compiled, compiled.cache) / "inductor").rglob("*.cpp"))
    assert sources
    for source in sources:
        assert "omp parallel" not in source.read_text(), "waking the pool takes longer than a decode step's loop"


@pytest.mark.usefixtures("no_compiling")
def test_a_warm_start_runs_neither_dynamo_nor_inductor(compiled: Compiled, tmp_path: Path) -> None:
    before = (utils.counters["frames"]["total"], len(utils.compilation_time_metrics.get("compile_fx_inner", ())))
    warm = make_compiler(compiled.model, compiled.cache, tmp_path)
    assert warm.build().cache_hit
    warm.publish()  # nothing to do
    after = (utils.counters["frames"]["total"], len(utils.compilation_time_metrics.get("compile_fx_inner", ())))
    assert after == before
    torch.testing.assert_close(run(compiled, warm), run(compiled, compiled.compiler), atol=0, rtol=0)
    spans = {span.name: span.attributes for span in warm.timeline.spans}
    assert spans["compile/fetch"] == {"cache": "hit"}
    assert "compile/dynamo" not in spans
    assert spans["compile/inductor/piece-2"] == {"cache": "hit"}


@pytest.mark.usefixtures("no_compiling")
def test_a_read_only_cache_serves_warm_starts(
    compiled: Compiled, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is opened for writing below it, which also holds where permissions do not stop us."""
    real_open, opened = os.open, []

    def note(path: object, flags: int, *arguments: object, **keywords: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            opened.append(str(path))
        return real_open(path, flags, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", note)
    assert make_compiler(compiled.model, copy, tmp_path / "work").build().cache_hit
    assert not [path for path in opened if str(copy) in path]


@pytest.mark.usefixtures("no_compiling")
@pytest.mark.parametrize("file", ["plan.json", "piece-1.bin"])
def test_a_truncated_entry_is_compiled_again(
    file: str, compiled: Compiled, copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = entry_of(compiled, copy) / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with caplog.at_level(logging.WARNING), pytest.raises(_CompiledNow):
        make_compiler(compiled.model, copy, tmp_path / "work").build()
    assert f"cannot be used and is compiled again: CacheEntryError: {file} is not what was stored" in caplog.text


@pytest.mark.usefixtures("no_compiling")
@pytest.mark.parametrize("content", [b"", b"not an artifact", b"\0" * 4096])
def test_a_foreign_artifact_is_compiled_again(
    content: bytes, compiled: Compiled, copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The digests are right, and yet torch cannot load it: another version of torch wrote it, say."""
    source = tmp_path / "foreign"
    shutil.copytree(entry_of(compiled, copy), source)
    (source / "manifest.json").unlink()
    (source / "factors.json").unlink()
    (source / "piece-0.bin").write_bytes(content)
    CompileCache(copy).publish(compiled.compiler.key, source, {})
    with caplog.at_level(logging.WARNING), pytest.raises(_CompiledNow):
        make_compiler(compiled.model, copy, tmp_path / "work").build()
    assert "cannot be used and is compiled again" in caplog.text


@pytest.mark.usefixtures("no_compiling")
def test_a_plan_for_another_model_is_compiled_again(compiled: Compiled, copy: Path, tmp_path: Path) -> None:
    source = tmp_path / "foreign"
    shutil.copytree(entry_of(compiled, copy), source)
    (source / "manifest.json").unlink()
    (source / "factors.json").unlink()
    plan = json.loads((source / "plan.json").read_bytes())
    plan["steps"][0]["operands"][0] = {"weight": "no.such.weight"}
    (source / "plan.json").write_text(json.dumps(plan))
    CompileCache(copy).publish(compiled.compiler.key, source, {})
    with pytest.raises(_CompiledNow):
        make_compiler(compiled.model, copy, tmp_path / "work").build()


@pytest.mark.usefixtures("no_compiling")
def test_of_two_servers_the_second_waits_and_loads(compiled: Compiled, tmp_path: Path) -> None:
    empty = CompileCache(tmp_path / "cache")
    second = make_compiler(compiled.model, empty.root, tmp_path / "second")
    key = compiled.compiler.key
    with empty.lock(key, 0.0) as held:
        assert held
        thread = threading.Thread(target=second.build)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        empty.publish(key, compiled.compiler.directory, compiled.compiler.factors)
    thread.join(60)
    assert second.compiled.cache_hit
    with empty.lock(key, 0.0) as held:
        assert held  # and a third need not wait for the second


def test_a_full_disk_costs_the_cache_and_nothing_else(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cold = make_compiler(compiled.model, tmp_path / "cache", tmp_path / "work")
    monkeypatch.setattr(ModelCompiler, "_compile", lambda _: compiled.compiler.compiled)
    cold.build()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cold.cache, "publish", full)
    with caplog.at_level(logging.WARNING):
        cold.publish()
    assert "is not cached, the next start compiles again" in caplog.text
    assert run(compiled, cold).shape == (11, compiled.model.config.hidden_size)
    with cold.cache.lock(cold.key, 0.0) as held:
        assert held


def test_no_room_to_work_in_is_said_in_one_line(compiled: Compiled, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--mode compile: cannot work in .*: Not a directory; free space there"):
        make_compiler(compiled.model, tmp_path / "cache", tmp_path / "file").build()


def test_no_compiler_is_said_in_one_line(compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.factors_module, "cpp_compiler", lambda: None)
    with pytest.raises(UserError, match="no C\\+\\+ compiler is found"):
        make_compiler(compiled.model, compiled.cache, tmp_path).build()


_IMPORTS = """
import contextlib, sys, threading
from pathlib import Path

import torch

from server.compilation.compiler import ModelCompiler


class Watch:
    def find_spec(self, name, path, target=None):
        if threading.current_thread() is not threading.main_thread():
            print(name, "in", threading.current_thread().name)


compiler = object.__new__(ModelCompiler)
compiler.device, compiler.directory = torch.device("cpu"), Path(sys.argv[1])
with contextlib.ExitStack() as stack:
    sys.meta_path.insert(0, Watch())
    compiler._import_inductor(stack)()
"""


def test_the_isa_probe_imports_no_setuptools_in_its_thread(tmp_path: Path) -> None:
    # Setuptools changes sys.meta_path as it is imported, and imports of other threads then fail, now and then.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    argv = [sys.executable, "-c", _IMPORTS, str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    assert not [line for line in done.stdout.splitlines() if "setuptools" in line]
