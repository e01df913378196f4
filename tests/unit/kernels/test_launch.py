"""Launchers of different kernels, loaded by several threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

from server.kernels.launch import keep_extensions_apart


def test_each_thread_gets_the_launcher_that_it_loaded() -> None:
    """A loader that behaves as Python's does for extension modules of one name: all of them share one module."""
    shared = ModuleType("__triton_launcher")
    both = threading.Barrier(2)

    def load(name: str, path: str) -> ModuleType:
        shared.launch = path  # type: ignore[attr-defined]
        return shared

    def launcher(path: str) -> str:
        module = build._load_module_from_path("__triton_launcher", path)
        both.wait(timeout=30)
        return str(module.launch)

    build: Any = SimpleNamespace(_load_module_from_path=load)
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(launcher, ["a", "b"]))) == 1  # what goes wrong
        keep_extensions_apart(build)
        keep_extensions_apart(build)
        assert list(pool.map(launcher, ["a", "b"])) == ["a", "b"]


def test_a_triton_without_such_modules_is_left_alone() -> None:
    build: Any = SimpleNamespace()
    keep_extensions_apart(build)
    assert not vars(build)
