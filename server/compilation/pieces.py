"""Compilation of a piece by Inductor, and loading of what it made.

Everything Inductor writes for a piece goes below one directory (`inductor_dir`): the shared objects of C++ kernels,
generated Python, and the launch configurations that benchmarking chose. A directory can be copied elsewhere and loaded
from there, on the same software and kind of machine. Artifacts carry their Triton kernels with them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx

CompiledPiece = Callable[..., Sequence[torch.Tensor]]

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def inductor_dir(directory: Path) -> Iterator[None]:
    """Let Inductor keep its caches below `directory`, and only there."""
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = str(directory)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CACHE_VARIABLE, None)
        else:
            os.environ[_CACHE_VARIABLE] = before


@contextmanager
def compile_processes(device: torch.device) -> Iterator[None]:
    """Let Inductor compile the Triton kernels of the block in processes of its own. They take seconds to start, which
    they do beside the block's first part (the capture), and end with it. On CPU Inductor runs g++ anyway."""
    if device.type != "cuda":
        yield
        return
    from torch._inductor import async_compile

    async_compile.AsyncCompile.warm_pool()
    async_compile.AsyncCompile.use_process_pool()  # submits a first job, which makes the processes start
    try:
        yield
    finally:
        pools = list(async_compile._pool_set)
        async_compile.AsyncCompile._ready_future = None
        async_compile.after_fork()  # forgets the pools
        # Joining their processes takes a moment and nobody waits for it.
        threading.Thread(target=_shut_down, args=(pools,), name="compile-processes", daemon=True).start()


def _shut_down(pools: list[Any]) -> None:
    for pool in pools:
        pool.shutdown()


@contextmanager
def _settings(**settings: Any) -> Iterator[None]:
    """Inductor's settings for our artifacts, whatever the environment says about its caches."""
    import torch._functorch.config
    import torch._inductor.config

    if torch._C._len_torch_function_stack() > 0:
        # Seen as "no aot_autograd artifacts": a default device is a mode that Inductor traces into its graphs.
        raise RuntimeError("compile outside of torch.device and torch.set_default_device")
    inductor = {
        "force_disable_caches": False,
        "fx_graph_cache": True,
        "fx_graph_remote_cache": False,
        "autotune_local_cache": True,
        "autotune_remote_cache": False,
        # Loops between the products run on one thread on a CPU. Inductor would open a parallel region for each, however
        # few the tokens, and waking the pool for it takes longer than a decode step's loop: 51 ms a token against 40
        # on two cores (SmolLM2-135M). The products, which are nearly all of the work, keep all threads.
        "cpp.threads": 1,
        **settings,
    }
    if hasattr(torch._inductor.config.triton, "enable_pdl"):
        # Unsafe between our own kernels, whatever TORCHINDUCTOR_ENABLE_PDL says: see `server.kernels.launch`, rule 5.
        inductor["triton.enable_pdl"] = False
    with torch._inductor.config.patch(inductor), torch._functorch.config.patch({"enable_autograd_cache": True}):
        yield


def compile_piece(piece: fx.GraphModule, artifact: Path) -> CompiledPiece:
    """Compile a piece for any number of tokens and save it to the file `artifact`. Call within `inductor_dir`."""
    import torch._inductor

    examples = [node.meta["example_value"] for node in piece.graph.nodes if node.op == "placeholder"]
    with _settings(), torch.no_grad():
        compiled = torch._inductor.standalone_compile(piece, examples, dynamic_shapes="from_graph")
        compiled.save(path=str(artifact), format="binary")
    return compiled


def load_piece(artifact: Path) -> CompiledPiece:
    """Load what `compile_piece` saved; runs code from the file. Call within `inductor_dir`.

    Raises whatever torch raises for a damaged or foreign file, a bare AssertionError among others.
    """
    from torch._inductor.standalone_compile import CompiledArtifact

    # One thread: otherwise loading alone starts a pool of processes for compiling.
    with _settings(compile_threads=1), _relocated_benchmarks():
        return CompiledArtifact.load(path=str(artifact), format="binary")


@contextmanager
def _relocated_benchmarks() -> Iterator[None]:
    """Let kernels find what benchmarking chose for them in an earlier start.

    Inductor keeps the choice beside the kernel's source, and a kernel out of an artifact looks for it where the source
    was when it was compiled. Our directories move; without this every start benchmarks all kernels again.
    """
    if not torch.cuda.is_initialized():
        yield
        return
    from unittest.mock import patch

    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    recheck = CachingAutotuner.recheck_autotune_cache

    def relocated(kernel: Any, *arguments: Any, **keywords: Any) -> None:
        if kernel.filename is not None:
            kernel.filename = relocate(kernel.filename, cache_dir())
        recheck(kernel, *arguments, **keywords)

    with patch.object(CachingAutotuner, "recheck_autotune_cache", relocated):
        yield


def relocate(source: str, directory: str) -> str:
    """Path below Inductor's cache `directory` of generated source that was below another one: `<2 letters>/<name>`."""
    return str(Path(directory, *Path(source).parts[-2:]))
