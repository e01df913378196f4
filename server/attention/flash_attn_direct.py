"""The function that flash-attn-4 compiled for us, kept so that a later start needs neither the package nor its DSL.

Importing flash-attn-4 takes 6 s on the machine of an H200, of which loading the one function that is called afterwards
is milliseconds. The package's own disk cache holds that function as an object file, but finds it only after the import.
`store` links the object into a shared library under a name made of all that the function depends on; `load` opens it
with `tvm_ffi`, the calling convention that it was compiled for.

The library is machine code: it lies in the package's cache directory, which only its owner may write to
(`server.worker.kernel_cache`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from server.attention.base import AttentionSpec

logger = logging.getLogger(__name__)

_CACHE_DIR = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")
_FUNCTION = "func"  # what flash-attn-4 calls every function that it exports


def library_path(spec: AttentionSpec) -> Path | None:
    """Where the function for `spec` is kept; None without a cache directory or without the package."""
    directory, found = os.environ.get(_CACHE_DIR), importlib.util.find_spec("flash_attn.cute")
    if not directory or found is None or found.origin is None:
        return None
    interface = Path(found.origin).with_name("interface.py").stat()
    properties = torch.cuda.get_device_properties(spec.device)
    factors = [
        *(f"{package} {metadata.version(package)}" for package in _PACKAGES),
        f"python {sys.version_info.major}.{sys.version_info.minor}",
        f"interface.py {interface.st_size} {interface.st_mtime_ns}",
        f"{properties.name} sm_{properties.major}{properties.minor}",
        f"{spec.dtype} heads {spec.num_heads}/{spec.num_kv_heads} of {spec.head_dim}, pages of {spec.block_size}",
    ]
    return Path(directory) / "direct" / f"{hashlib.sha256('; '.join(factors).encode()).hexdigest()[:32]}.so"


def load(path: Path | None) -> Any:
    """The function in the library at `path`, or None when there is none or it cannot be loaded."""
    if path is None or not path.is_file():
        return None
    try:
        import tvm_ffi

        return tvm_ffi.load_module(str(path))[_FUNCTION]
    except Exception as error:  # of another build, truncated, without its runtime library
        logger.warning("%s cannot be loaded, flash-attn-4 is imported instead: %s", path, error)
        return None


def store(path: Path | None, cache: Any, key: Any) -> None:
    """Link the entry `key` of the package's disk cache into the library `path`. Nothing depends on it: without a
    linker, or where the package keeps no files, later starts import the package."""
    linker = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if path is None or linker is None or not hasattr(cache, "cache_path"):
        return
    try:
        from cutlass.cute.runtime import find_runtime_libraries

        source = Path(cache.cache_path) / f"{cache._key_to_hash(key)}.o"
        libraries = find_runtime_libraries(enable_tvm_ffi=False)
        search = [f"-Wl,-rpath,{Path(library).parent}" for library in libraries]
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            linked = Path(folder) / path.name
            command = [linker, "-shared", str(source), *libraries, *search, "-o", str(linked)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            linked.rename(path)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        logger.warning("flash-attn-4's function is not kept for the next start: %s", error)
