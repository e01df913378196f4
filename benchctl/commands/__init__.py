"""The commands, one module each: parse options, call a plain function, print.

Every module has `register(app: typer.Typer) -> None`; `benchctl.cli` imports only the module that is asked for.
"""
