"""Answers `benchctl serve --explain-cache`: would this start find its compiled graph, and if not, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.compilation.factors import collect, explain
from server.compilation.store import CompileCache
from server.config import ServerConfig
from server.paths import cache_root

if TYPE_CHECKING:
    import torch

    from server.models.config import ModelConfig


def compile_cache(cache_dir: str | None) -> CompileCache:
    """The cache below `cache_dir`, the root of all caches (None: the default)."""
    return CompileCache(cache_root(cache_dir) / "compile")


def server_factors(
    config: ServerConfig,
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    token_budget: int,
) -> dict[str, str]:
    """Factors of a server's compiled graph."""
    return collect(
        model,
        device_type=device.type,
        device_index=device.index or 0,
        dtype=dtype,
        max_positions=max_positions,
        token_budget=token_budget,
        custom_ops=config.compilation.custom_ops,
    )


def explain_cache(config: ServerConfig) -> list[str]:
    """Lines that say whether the cache has the compiled graph of `config`, or which factors differ from the nearest
    entry. Raises UserError for a model or device that does not exist, or a cache that cannot be listed."""
    if config.compilation.mode == "eager":
        return ["eager mode compiles nothing"]
    from server.models.registry import resolve_model
    from server.worker.device import init_device, resolve_device, resolve_dtype, token_budget

    resolved = resolve_model(config.model)
    device = resolve_device(config.device)
    init_device(device)
    factors = server_factors(
        config,
        resolved.config,
        device=device,
        dtype=resolve_dtype(config.model.dtype, resolved.config, device),
        max_positions=resolved.max_model_len,
        token_budget=token_budget(config.scheduler, device),
    )
    return explain(factors, compile_cache(config.compilation.cache_dir).entries())
