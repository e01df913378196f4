"""The `benchctl` command.

What takes long to import is imported within `main`: a Ctrl-C before its first line would show a traceback.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

TYPE_CHECKING = False  # not typing's, which is one more import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import typer

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Command (or command group) -> module under benchctl.commands.
COMMANDS = {
    "serve": "serve",
    "run": "run",
    "matrix": "matrix",
    "startup": "startup",
    "report": "report",
    "compare": "compare",
    "gate": "gate",
    "history": "history",
    "workload": "workload",
    "models": "models",
    "cache": "cache",
    "kernels": "kernels",
    "mock": "mock",
}


def build_app(argv: list[str]) -> typer.Typer:
    """The Typer app with the command that `argv` names, or with all of them (`--help`, completion, a wrong name).

    Importing one command only keeps `benchctl serve` from paying for the imports of reports and statistics.
    """
    import importlib

    import typer

    import benchctl

    def version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"benchctl {benchctl.__version__}")
            raise typer.Exit

    def root(
        version: bool = typer.Option(
            False, "--version", callback=version, is_eager=True, help="Print the version and exit."
        ),
    ) -> None:
        """Benchmark and load-test LLM serving, with a server of our own bundled."""

    app = typer.Typer(
        name="benchctl", no_args_is_help=True, pretty_exceptions_show_locals=False, rich_markup_mode="markdown"
    )
    app.callback()(root)
    named = next((a for a in argv if not a.startswith("-")), None)
    modules = [COMMANDS[named]] if named in COMMANDS else list(dict.fromkeys(COMMANDS.values()))
    for module in modules:
        importlib.import_module(f"benchctl.commands.{module}").register(app)
    return app


def _whole_names_in_help() -> None:
    """Have typer continue an option's name in the next line on a narrow help page, not cut it off with `…`."""
    from rich.text import Text
    from typer import rich_utils

    def folding(highlight: Callable[[str | Text], Text]) -> Callable[[str | Text], Text]:
        def highlighted(text: str | Text) -> Text:
            shown = highlight(text)
            shown.overflow = "fold"
            return shown

        return highlighted

    for name in ("highlighter", "negative_highlighter"):
        setattr(rich_utils, name, folding(getattr(rich_utils, name)))


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    """Before a command has begun, or after it, there is nothing to put in order."""
    os._exit(130)


def _give_up_output() -> None:
    """Python would try to write the rest at its end, and complain again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def main() -> None:
    """Entry point: run the command; a `UserError` becomes one line on stderr and its exit code.

    So does a disk that is full under standard output; a reader of it that has gone ends the command without a word.
    """
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not below nohup, for one
    if interruptible:
        signal.signal(signal.SIGINT, _leave_at_once)
    import typer

    from server.errors import UserError

    argv = sys.argv[1:]
    if "--help" in argv:
        _whole_names_in_help()
    app = build_app(argv)
    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            app(args=argv, standalone_mode=True)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # now, while it can be said that it does not fit
    except OSError as error:
        if error.errno not in _NO_ROOM and error.errno != errno.EPIPE:
            raise
        _give_up_output()
        if error.errno == errno.EPIPE:
            sys.exit(1)
        typer.echo(f"benchctl: the output cannot be written: {error.strerror}; free some space where it goes", err=True)
        sys.exit(UserError.exit_code)
    except UserError as error:
        typer.echo(f"benchctl: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, _leave_at_once)
