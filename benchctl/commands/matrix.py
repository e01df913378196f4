"""`benchctl matrix`: launch, wait, replay, stop, for every cell of a suite; then the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def matrix(
    suite: Annotated[
        str, typer.Option("--suite", "-s", metavar="NAME|FILE", help="Shipped suite, or a TOML file.")
    ] = "quick",
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for results, logs and reports.")] = Path(
        "benchctl-results"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep finished cells whose configuration is the same.")
    ] = False,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override the suite, e.g. --set server.max_num_seqs=8."),
    ] = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="Show the cells, run nothing.")] = False,
    list_suites: Annotated[bool, typer.Option("--list", help="Show the shipped suites, run nothing.")] = False,
) -> None:
    """Run every cell of a suite: engine x model x mode x attention backend x workload x arrival.

    Exit code: 0 when every cell that can run here did, 1 when one failed (or none ran), 2 for bad input, 130 when
    interrupted; results so far are kept and `--resume` goes on.
    """
    from benchctl.matrix.plan import plan_matrix
    from benchctl.matrix.suite import load_suite, shipped_suites

    if list_suites:
        for name, line in shipped_suites().items():
            typer.echo(f"{name:<10} {line}")
        return
    plan = plan_matrix(load_suite(suite, assignments or ()))
    from benchctl.matrix.models import check_models, ensure_models
    from benchctl.matrix.traffic import TrafficFactory
    from reports.console import print_report, report_console

    console = report_console()
    servers = [server.config for server in plan.servers]
    if plan_only:
        check_models(servers, console)
        TrafficFactory().check(plan.cells)
        for cell in plan.cells:
            typer.echo(cell.id)
        return
    from benchctl.matrix.live import make_observer
    from benchctl.matrix.replay import replay_cell
    from benchctl.matrix.runner import MatrixRunner
    from benchctl.preparing import preparing
    from reports.writers import write_reports

    ensure_models(servers, console)
    with preparing() as on_read:
        traffic = TrafficFactory(on_read).prepare(plan.cells)
    with make_observer(console) as observer:
        runner = MatrixRunner(plan, traffic, output, observer, replay_cell, resume=resume)
        results = runner.run()
    if results.results:
        written = write_reports(results, output)
        console.print()
        print_report(results, console)
        for path in written:
            console.print(str(path), soft_wrap=True, highlight=False)
    if runner.interrupted:
        console.print("interrupted: results so far are kept, go on with --resume", style="yellow")
        raise typer.Exit(130)
    statuses = {result.status for result in results.results}
    if statuses - {"ok", "unsupported"} or "ok" not in statuses:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command(name="matrix")(matrix)
