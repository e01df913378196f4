"""`benchctl models`: list the models that can be served, pull real checkpoints."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Presets (dummy weights) and real checkpoints.")
    group.command("ls")(ls)
    group.command("pull")(pull)
    app.add_typer(group, name="models")


def ls() -> None:
    """List presets, pulled models, supported models in the hub cache, and models that can be pulled."""
    from rich.console import Console
    from rich.table import Table

    from server.models.pull import list_models

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", no_wrap=True)
    table.add_column("kind")
    table.add_column("architecture")
    table.add_column("parameters", justify="right")
    table.add_column("context", justify="right")
    table.add_column("where", overflow="fold")
    for entry in list_models():
        config = entry.config
        shape = ("", "", "")
        if config is not None:
            family = config.architecture.removesuffix("ForCausalLM")
            shape = (family, f"{config.num_parameters / 1e6:,.1f} M", f"{config.max_position_embeddings:,}")
        table.add_row(entry.name, entry.kind, *shape, str(entry.path or entry.note))
    Console().print(table)


def pull(
    name: str = typer.Argument(help="`smollm2-135m`, or a hub id such as `Qwen/Qwen3-0.6B`."),
) -> None:
    """Fetch a checkpoint so that `benchctl serve NAME` finds it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from server.models.pull import pull as pull_model

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(f"{phase} {name}")
            bars.update(tasks[phase], completed=done, total=total or None)

        folder = pull_model(name, report)
    typer.echo(str(folder))
