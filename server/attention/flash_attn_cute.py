"""flash-attn-4 (`flash_attn.cute`) as the FLASH_ATTN backend calls it: compiled once, kept on disk, called directly.

The package's entry point resolves some forty options in Python on every call (100-200 us). On Hopper the compiled
function it ends up calling depends only on dtype, head size, group size and whether a page is one key tile, so one call
through the entry point finds it and later calls pass it their tensors directly. Blackwell goes through the entry point
(its function depends on the batch); that path follows the package's interface and has not run here.

Written against flash-attn-4 4.0.0b36. A version that passes other arguments is refused, never guessed at.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from server.attention import flash_attn_build, flash_attn_direct
from server.attention.base import AttentionSpec
from server.paths import benchctl_cache_dir

logger = logging.getLogger(__name__)

# Where the tensors stand among the arguments of the compiled forward function for sm_90.
_NUM_ARGUMENTS = 18
_TENSOR_POSITIONS = {"q": 0, "k": 1, "v": 2, "out": 3, "scale": 5, "cu_seqlens_q": 6, "seqused_k": 9, "page_table": 10}
_AUX_POSITION = 15
_NO_AUX_DATA = (None, None)
_BUILD_TIMEOUT_S = 120.0

_CACHE_DIR = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def why_missing() -> str | None:
    """None if flash-attn-4 is installed, else one line."""
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "FLASH_ATTN needs flash-attn-4 on this GPU: pip install 'benchctl[gpu]'"
    return None


def load_interface(cache_dir: Path | None = None) -> Any:
    """Import `flash_attn.cute.interface` with its disk cache on; the package reads these variables at import only.

    Whoever has set them (the worker, for the directory that `--cache-dir` names) has decided already. The cache holds
    machine code, so a directory that another user could write to is not used: a warning says so and kernels are
    compiled at every start.
    """
    if "flash_attn.cute.interface" not in sys.modules and "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR" not in os.environ:
        directory = cache_dir or benchctl_cache_dir() / "kernels" / "flash_attn_cute"
        if _is_private(directory):
            os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
            os.environ[_CACHE_DIR] = str(directory)
    return importlib.import_module("flash_attn.cute.interface")


def _is_private(directory: Path) -> bool:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return True
    logger.warning("%s is writable by others: flash-attn kernels are not cached there", directory)
    return False


class CuteForward:
    """Causal paged attention through flash-attn-4 for one dtype, head layout and page size."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._is_hopper = torch.cuda.get_device_capability(spec.device)[0] == 9
        self._library = flash_attn_direct.library_path(spec) if self._is_hopper else None
        self._kept = flash_attn_direct.load(self._library)
        """What an earlier start found, until its first call."""
        self._build: subprocess.Popen[bytes] | None = None
        if self._kept is None and self._library is not None:
            self._build = flash_attn_build.start(spec, self._library)
        self._direct: Any = None
        self._aux: Any = _NO_AUX_DATA

    def is_built(self) -> bool:
        """Wait for the process that compiles the function; whether it is there now. If not, the first call imports the
        package and compiles, and must come from the main thread: both clash with Dynamo in another one."""
        if self._build is not None:
            build, self._build = self._build, None
            try:
                _, said = build.communicate(timeout=_BUILD_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                build.kill()
                _, said = build.communicate()
            self._kept = flash_attn_direct.load(self._library)
            if self._kept is None:
                last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
                logger.warning("flash-attn-4 is compiled in this process, another one failed: %s", last)
        return self._kept is not None or self._direct is not None

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        max_query_len: int,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """query and output (T, H, D), caches (N, P, K, D). Rows that no sequence covers are not written."""
        direct = self._direct
        if direct is not None:
            direct(
                query, key_cache, value_cache, output, None, scale, query_start_loc, None, None, seq_lens, block_table,
                None, None, None, None, self._aux, None, None,
            )  # fmt: skip
            return
        self.is_built()
        kept, self._kept = self._kept, None
        if kept is not None:
            self._direct = kept
            try:
                self(
                    query, key_cache, value_cache, query_start_loc, seq_lens, block_table, max_query_len, scale, output
                )
                return
            except Exception as error:  # the function takes other arguments: the package was changed in place
                logger.warning("flash-attn-4's kept function is not used: %s", error)
                self._direct = None
        interface = load_interface()
        keywords = {
            "cu_seqlens_q": query_start_loc,
            "seqused_k": seq_lens,
            "page_table": block_table,
            "softmax_scale": scale,
            "causal": True,
            "out": output,
        }
        if self._is_hopper and query_start_loc.shape[0] - 1 <= interface.BIN_BATCH_SEARCH_THRESH:
            self._bind(interface._flash_attn_fwd, query, key_cache, value_cache, keywords)
            return
        interface._flash_attn_fwd(query, key_cache, value_cache, max_seqlen_q=max_query_len, **keywords)

    def _bind(
        self, forward: Any, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, keywords: Any
    ) -> None:
        """Run once through the entry point and keep the compiled function that it calls.

        Without `max_seqlen_q` the entry point selects the same function for any query length.
        """
        recorder = Recorder(forward.compile_cache)
        forward.compile_cache = recorder
        try:
            forward(query, key_cache, value_cache, **keywords)
        finally:
            forward.compile_cache = recorder.cache
        arguments = recorder.arguments
        filled = {*_TENSOR_POSITIONS.values(), _AUX_POSITION}
        if len(arguments) != _NUM_ARGUMENTS or any(
            (argument is None) == (position in filled) for position, argument in enumerate(arguments)
        ):
            raise RuntimeError(
                "this version of flash-attn-4 passes other arguments to its kernel than 4.0.0b36: install that version"
            )
        self._aux = arguments[_AUX_POSITION]
        self._direct = recorder.function
        if tuple(self._aux) == _NO_AUX_DATA:
            flash_attn_direct.store(self._library, recorder.cache, recorder.key)


class Recorder:
    """Stands in for the package's cache of compiled functions during one call and notes what is called, with what."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.key: Any = None
        self.function: Any = None
        self.arguments: tuple[Any, ...] = ()

    def __contains__(self, key: Any) -> bool:
        self.key = key
        return key in self.cache

    def __setitem__(self, key: Any, function: Any) -> None:
        self.cache[key] = function

    def __getitem__(self, key: Any) -> Any:
        self.key, self.function = key, self.cache[key]

        def call(*arguments: Any) -> Any:
            self.arguments = arguments
            return self.function(*arguments)

        return call
