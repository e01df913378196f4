"""Brings the models of a plan to this machine before anything is measured."""

from __future__ import annotations

from rich.console import Console

from benchctl.matrix.plan import Plan


def ensure_models(plan: Plan, console: Console) -> None:
    """Pull what can be pulled by its short name and is not here; UserError when that does not work."""
    from server.models.pull import pull
    from server.models.registry import must_be_pulled

    for model in dict.fromkeys(server.config.model for server in plan.servers if server.config.engine != "url"):
        if must_be_pulled(model):
            with console.status(f"pulling {model} (once)"):
                folder = pull(model)
            console.print(f"pulled {model} to {folder}", soft_wrap=True, highlight=False)
