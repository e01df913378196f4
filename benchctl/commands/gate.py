"""`benchctl gate`: did the candidate make serving slower? An exit code for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def gate(
    baseline: Annotated[
        Path | None, typer.Argument(metavar="BASELINE", help="Results (a directory per run), or a checkout.")
    ] = None,
    candidate: Annotated[
        Path | None, typer.Argument(metavar="CANDIDATE", help="The same; default: this checkout.")
    ] = None,
    base_rev: Annotated[
        str | None, typer.Option("--base-rev", metavar="REV", help="Git revision to run as baseline.")
    ] = None,
    candidate_rev: Annotated[
        str | None, typer.Option("--candidate-rev", metavar="REV", help="Git revision to run as candidate.")
    ] = None,
    base_command: Annotated[
        str | None, typer.Option("--base-command", metavar="CMD", help="Command that writes results to {output}.")
    ] = None,
    candidate_command: Annotated[
        str | None, typer.Option("--candidate-command", metavar="CMD", help="The same for the candidate.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option("--suite", "-s", metavar="NAME|FILE", help="What to run, and the [gate] table to decide by."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for runs, verdict and reports.")] = Path(
        "benchctl-gate"
    ),
    max_pairs: Annotated[
        int | None, typer.Option("--max-pairs", help="Most pairs of runs; default: the suite's gate.max_pairs.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override the suite, e.g. gate.max_pairs=8."),
    ] = None,
    ignore_field: Annotated[
        list[str] | None,
        typer.Option("--ignore-field", metavar="FIELD", help="Compare although this field differs, e.g. cpu."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the order of runs; default: drawn.")] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Run one side against itself: what can the gate see on this machine?")
    ] = False,
    github: Annotated[
        bool | None,
        typer.Option("--github/--no-github", help="Annotations and job summary; default: inside a GitHub workflow."),
    ] = None,
) -> None:
    """Decide whether the candidate made serving slower, at a stated error rate.

    Give results, two checkouts, --base-rev, or two commands. Runs are made in interleaved pairs until the answer is
    plain. Exit code: 0 pass, 1 regression (or the candidate fails), 2 bad input, 3 inconclusive, 130 interrupted.
    """
    from benchctl.gate.comparable import check_ignored
    from benchctl.gate.gate import (
        DEFAULT_SUITE,
        GateRequest,
        SideRequest,
        are_results,
        calibration_pairs,
        gate_results,
        gate_sources,
        load_settings,
    )
    from benchctl.gate.outputs import on_github, tell_github, write_calibration, write_outputs
    from benchctl.gate.show import render_calibration, render_verdict
    from benchctl.matrix.interrupts import Interrupts
    from reports.console import report_console

    console = report_console()
    if (base_rev or base_command) and candidate is None:
        baseline, candidate = None, baseline  # the one path that is given is not the baseline's
    base, new = SideRequest(baseline, base_rev, base_command), SideRequest(candidate, candidate_rev, candidate_command)
    results = are_results(base, new, calibrate=calibrate)
    runs_suite = not (results or base_command or candidate_command)
    request = GateRequest(
        baseline=base,
        candidate=new,
        settings=load_settings(suite, assignments or [], max_pairs, runs_suite=runs_suite),
        output=output,
        suite=suite or DEFAULT_SUITE,
        assignments=assignments or [],
        seed=seed,
        ignore=check_ignored(ignore_field or ()),
        say=lambda text: console.print(text, style="dim", soft_wrap=True, highlight=False),
    )
    with Interrupts():
        if calibrate:
            from benchctl.gate.calibrate import calibrate as calibrate_pairs

            calibration = calibrate_pairs(calibration_pairs(request, results=results), request.settings)
            path = write_calibration(calibration, output)
            console.print(render_calibration(calibration))
            console.print(str(path), style="dim", soft_wrap=True, highlight=False)
            return
        verdict = gate_results(request) if results else gate_sources(request)
    written = write_outputs(verdict, output)
    console.print(render_verdict(verdict))
    for path in written:
        console.print(str(path), style="dim", soft_wrap=True, highlight=False)
    if on_github() if github is None else github:
        for line in tell_github(verdict):
            typer.echo(line)
    raise typer.Exit(verdict.exit_code)


def register(app: typer.Typer) -> None:
    app.command(name="gate")(gate)
