"""The compiler of a server's model, from the server's configuration."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from server.compilation.compiler import ModelCompiler
from server.compilation.explain import compile_cache, server_factors
from server.config import ServerConfig
from server.models.decoder import CausalLM
from server.timeline import Timeline


def make_compiler(
    config: ServerConfig,
    model: CausalLM,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    token_budget: int,
    timeline: Timeline,
) -> ModelCompiler:
    """A compiler for the decoder of `model`; it works in the server's runtime directory.

    `max_positions` is what the model was built with."""
    factors = server_factors(
        config,
        model.config,
        device=device,
        dtype=dtype,
        max_positions=max_positions,
        token_budget=token_budget,
    )
    work_dir = Path(config.runtime_dir or tempfile.gettempdir()) / "compile"
    return ModelCompiler(
        model.model,
        factors,
        compile_cache(config.compilation.cache_dir),
        work_dir,
        timeline,
        device=device,
        token_budget=token_budget,
    )
