"""Brings models to this machine, and checks them, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from reports.schema import CellConfig
from server.config import ModelOptions
from server.models.pull import pull
from server.models.registry import PRESETS, is_hub_id, must_be_pulled, resolve_model


def ensure_models(configs: Sequence[CellConfig], console: Console) -> None:
    """Pull what can be pulled by its short name and is not here, and resolve what the bundled server is to serve.

    Raises UserError: a model that cannot be had, or that does not exist, or a context that it does not have.
    """
    for model in dict.fromkeys(config.model for config in configs if config.engine != "url"):
        if must_be_pulled(model):
            with console.status(f"pulling {model} (once)"):
                folder = pull(model)
            console.print(f"pulled {model} to {folder}", soft_wrap=True, highlight=False)
    _resolve(configs, console)


def check_models(configs: Sequence[CellConfig], console: Console) -> None:
    """What `ensure_models` would refuse, of the models that need not be fetched for it. Raises UserError."""
    _resolve([config for config in configs if not comes_from_elsewhere(config.model)], console)


def comes_from_elsewhere(model: str) -> bool:
    """Whether a model that is to be served may have to be downloaded first."""
    if model in PRESETS or Path(model).expanduser().is_dir():
        return False
    return must_be_pulled(model) or is_hub_id(model)


def _resolve(configs: Sequence[CellConfig], console: Console) -> None:
    bundled = {config.model: config for config in configs if config.engine == "benchctl"}
    for model, config in bundled.items():
        with console.status(f"looking for {model}"):
            resolve_model(_options(config))


def _options(config: CellConfig) -> ModelOptions:
    arguments = config.server_args
    return ModelOptions(
        model=config.model,
        load_format=arguments.get("load_format", "auto"),
        max_model_len=arguments.get("max_model_len"),
    )
