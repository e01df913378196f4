"""`benchctl cache`: what is cached on disk, and how to be rid of it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from server.compilation.kernels import FolderInfo
    from server.compilation.store import EntryInfo

_SHOWN = ("model.architecture", "model.hidden_size", "model.num_layers", "dtype", "device", "token_budget")
"""Factors that tell a person which graph an entry holds."""

_Directory = Annotated[
    str | None, typer.Option("--compilation-cache-dir", help="Root of the caches, if it is not the default.")
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Compiled graphs, kernels and bytecode on disk.")
    group.command("ls")(ls)
    group.command("clear")(clear)
    app.add_typer(group, name="cache")


def ls(
    directory: _Directory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all factors of every entry.")] = False,
) -> None:
    """List compiled graphs, newest first, the kernels compiled beside them, and Python's bytecode."""
    from server.compilation.explain import compile_cache
    from server.compilation.kernels import bytecode_cache, kernel_caches

    cache = compile_cache(directory)
    entries, folders = cache.entries(), kernel_caches(directory)
    bytecode = bytecode_cache(directory)
    if as_json:
        document = {
            "directory": str(cache.root),
            "entries": [
                {"key": e.key, "bytes": e.bytes, "modified": e.modified, "factors": e.factors} for e in entries
            ],
            "kernels": [_folder(folder) for folder in folders],
            "bytecode": None if bytecode is None else _folder(bytecode),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"{cache.root}: {_graphs(len(entries))}", soft_wrap=True, highlight=False)
    if entries:
        console.print(_table(entries))
    for folder in (*folders, *((bytecode,) if bytecode is not None else ())):
        line = f"{folder.directory}: {folder.files} files, {_size(folder.bytes)}"
        console.print(line, soft_wrap=True, highlight=False)


def clear(
    directory: _Directory = None,
    keep_kernels: Annotated[bool, typer.Option("--keep-kernels", help="Remove compiled graphs only.")] = False,
) -> None:
    """Remove compiled graphs, kernels and bytecode; a running server has its own copies. Models stay."""
    from server.compilation.explain import compile_cache
    from server.compilation.kernels import clear_bytecode_cache, clear_kernel_caches
    from server.errors import UserError

    try:
        count, size = compile_cache(directory).clear()
        files, kernel_bytes = (0, 0) if keep_kernels else clear_kernel_caches(directory)
        modules, module_bytes = (0, 0) if keep_kernels else clear_bytecode_cache(directory)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be removed: {error.strerror}") from error
    removed = [f"{_graphs(count)} ({_size(size)})", f"{files} kernel files ({_size(kernel_bytes)})"]
    if modules:
        removed.append(f"{modules} files of bytecode ({_size(module_bytes)})")
    typer.echo(f"removed {', '.join(removed[:-1])} and {removed[-1]}")


def _folder(info: FolderInfo) -> dict[str, str | int]:
    return {"directory": str(info.directory), "files": info.files, "bytes": info.bytes}


def _graphs(count: int) -> str:
    return f"{count} compiled graph{'' if count == 1 else 's'}"


def _table(entries: list[EntryInfo]) -> object:
    from datetime import datetime

    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("key", "stored", "size", "model", "dtype", "budget", "device"):
        table.add_column(name, no_wrap=True)
    for entry in entries:
        architecture, hidden, layers, dtype, device, budget = (entry.factors.get(n, "?") for n in _SHOWN)
        stored = datetime.fromtimestamp(entry.modified).strftime("%m-%d %H:%M")
        model = f"{architecture.removesuffix('ForCausalLM')} {hidden} x {layers}"
        table.add_row(entry.key[:12], stored, _size(entry.bytes), model, dtype, budget, device)
    return table


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
