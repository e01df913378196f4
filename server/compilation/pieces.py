"""Compilation of a piece by Inductor, and loading of what it made.

Everything Inductor and Triton write for a piece goes below one directory (`inductor_dir`): the shared objects of
C++ kernels, generated Python, and the launch configurations that benchmarking chose. A directory can be copied
elsewhere and loaded from there, on the same software and kind of machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import fx

CompiledPiece = Callable[..., Sequence[torch.Tensor]]


@contextmanager
def inductor_dir(directory: Path) -> Iterator[None]:
    """Let Inductor and Triton keep their caches below `directory`, and only there."""
    ours = {"TORCHINDUCTOR_CACHE_DIR": str(directory), "TRITON_CACHE_DIR": str(directory / "triton")}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _settings() -> Iterator[None]:
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
    }
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

    with _settings():
        return CompiledArtifact.load(path=str(artifact), format="binary")
