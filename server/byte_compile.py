"""`python -m server.byte_compile FOLDER PROCESSES PARENT`: compile ahead what the server's processes will import.

Runs at low priority beside a first start (see `server.bytecode`): several processes get through the sources of torch
while the worker imports the first tenth of it. It only ever helps: what it cannot compile or write, Python compiles at
the import.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import py_compile
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from server.bytecode import COMPLETE
from server.child import die_with_parent

PACKAGES = (
    "server", "msgspec", "zmq", "numpy", "torch", "torchgen", "typing_extensions", "tqdm", "pynvml", "sympy", "mpmath",
    "triton", "networkx", "jinja2", "filelock", "flash_attn", "cutlass", "tvm_ffi", "quack",
)  # fmt: skip
"""What the worker and the processes that it starts import, in the order in which they do. Missing ones are passed
over."""

_UNUSED = {
    "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "site-packages", "dist-packages",
}  # fmt: skip


def sources(packages: tuple[str, ...] = PACKAGES) -> Iterator[Path]:
    """Files to compile, most urgent first: the standard library, then the packages."""
    yield from _below(Path(sysconfig.get_path("stdlib")))
    for name in packages:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is None:
            continue
        for folder in spec.submodule_search_locations or ():
            yield from _below(Path(folder))
        if spec.submodule_search_locations is None and spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin)


def _below(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        path = Path(folder)
        folders[:] = sorted(set(folders) - _UNUSED)
        yield from (path / name for name in sorted(files) if name.endswith(".py"))


def compile_files(files: list[Path]) -> None:
    """Write the bytecode of those that have none yet. Raises OSError when it cannot be written."""
    for source in files:
        compiled = importlib.util.cache_from_source(str(source))
        if os.path.exists(compiled):  # of an older source: Python notices, and writes it again
            continue
        # Templates that are no Python, sources in another encoding.
        with contextlib.suppress(py_compile.PyCompileError, SyntaxError, ValueError, RecursionError):
            py_compile.compile(
                str(source),
                compiled,
                doraise=True,
                quiet=1,
                invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
            )


def main() -> int:
    folder, processes, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    os.nice(10)
    sys.pycache_prefix = str(folder)
    files = list(sources())
    children, pid = [], os.getpid()
    for number in range(processes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                die_with_parent(pid)
                # Every n-th file: all of them work on the most urgent ones first, and end at about the same time.
                compile_files(files[number::processes])
                code = 0
            except OSError:
                pass  # a full disk: the imports go without
            finally:
                os._exit(code)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    if not failed:
        with contextlib.suppress(OSError):
            (folder / COMPLETE).touch(mode=0o600)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
