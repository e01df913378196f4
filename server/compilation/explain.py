"""Answers `benchctl serve --explain-cache`: would this start find its compiled graph, and if not, why."""

from __future__ import annotations

from pathlib import Path

from server.compilation.factors import collect, explain
from server.compilation.store import CompileCache
from server.config import ServerConfig
from server.paths import benchctl_cache_dir


def compile_cache(config: ServerConfig) -> CompileCache:
    """The cache that a server with `config` uses."""
    root = config.compilation.cache_dir
    return CompileCache((Path(root).expanduser() if root else benchctl_cache_dir()) / "compile")


def explain_cache(config: ServerConfig) -> list[str]:
    """Lines that say whether the cache has the compiled graph of `config`, or which factors differ from the nearest
    entry. Raises UserError for a model or device that does not exist."""
    if config.compilation.mode == "eager":
        return ["eager mode compiles nothing"]
    return explain(server_factors(config), compile_cache(config).entries())


def server_factors(config: ServerConfig) -> dict[str, str]:
    """The factors as the worker of a server with `config` will collect them."""
    from server.models.registry import resolve_model
    from server.worker.device import init_device, resolve_device, resolve_dtype, token_budget

    resolved = resolve_model(config.model)
    model = resolved.config
    device = resolve_device(config.device)
    init_device(device)
    return collect(
        model,
        device_type=device.type,
        device_index=device.index or 0,
        dtype=resolve_dtype(config.model.dtype, model, device),
        max_positions=resolved.max_model_len,
        token_budget=token_budget(config.scheduler, device),
        custom_ops=config.compilation.custom_ops == "on",
    )
