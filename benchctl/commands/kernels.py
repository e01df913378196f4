"""`benchctl kernels`: measure every kernel and attention backend, or check them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from server.errors import UserError

if TYPE_CHECKING:
    import torch

    from benchctl.kernelbench.case import Case

DTYPES = ("bfloat16", "float16", "float32")
SWEEPS = ("decode", "prefill", "gemv")


def register(app: typer.Typer) -> None:
    app.command("kernels")(kernels)


def kernels(
    check: bool = typer.Option(
        False, "--check", help="Only compare with fp32. Without a GPU the kernels run in Triton's interpreter."
    ),
    kernel: str = typer.Option("*", "--kernel", help="Only kernels that match this pattern, e.g. 'attention/*'."),
    dtype: list[str] = typer.Option(["bfloat16"], "--dtype", help="Element type; may be given several times."),
    page: list[int] = typer.Option([16, 64], "--page", help="Cache page sizes to time the backends at."),
    small: bool = typer.Option(False, "--small", help="With --check: few and small shapes."),
    sweep: str | None = typer.Option(
        None, "--sweep", help="Time candidate launch parameters instead: decode, prefill or gemv."
    ),
    model: str | None = typer.Option(
        None, "--model", help="Also time decode steps of this whole model, e.g. llama-3.1-8b, for each backend."
    ),
    output: Path | None = typer.Option(None, "--output", help="Write kernels.json, and kernels.html if timed, here."),
) -> None:
    """Micro-benchmark the kernels: time, share of the measured roofline, and error against fp32."""
    for name in dtype:
        if name not in DTYPES:
            raise UserError(f"--dtype {name}: give one of {', '.join(DTYPES)}")
    if sweep is not None and sweep not in SWEEPS:
        raise UserError(f"--sweep {sweep}: give one of {', '.join(SWEEPS)}")
    if model is not None and (check or sweep is not None):
        raise UserError("--model times a model: leave --check and --sweep out")
    device = _device(check=check)

    import torch
    from rich.console import Console

    from benchctl.kernelbench import measure as measuring
    from benchctl.kernelbench import output as writing
    from benchctl.kernelbench.decode_step import eager_steps
    from benchctl.kernelbench.host_cost import host_costs
    from benchctl.kernelbench.suite import all_check_cases, all_timed_cases, launch_cases
    from benchctl.kernelbench.sweep import sweep as run_sweep

    console = Console(width=None if sys.stdout.isatty() else 160)
    interpreted = device.type != "cuda"
    dtypes = [getattr(torch, name) for name in dtype]
    facts = writing.environment(device, interpreted=interpreted)
    if sweep is not None:
        candidates = [c for d in dtypes for p in page for c in run_sweep(sweep, device, d, p, 128)]
        writing.print_candidates(console, candidates, best=5)
        _write(output, writing.as_json(facts, [], candidates=candidates))
        return
    if check:
        cases = _announced(c for c in all_check_cases(device, dtypes, small=small) if fnmatch(c.kernel, kernel))
        rows = list(measuring.check(cases, interpreted=interpreted))
        roofline, host = None, []
    else:
        roofline = measuring.measure_roofline(device)
        cases = _announced(c for c in all_timed_cases(device, dtypes, page) if fnmatch(c.kernel, kernel))
        rows = list(measuring.measure(cases, roofline))
        host = list(host_costs(c for c in launch_cases(device) if fnmatch(c.kernel, kernel)))
    steps = [] if model is None else list(eager_steps(model, device, [1, 8, 64], 640))
    if not rows and not steps:
        raise UserError(f"--kernel {kernel!r} matches no kernel that can run here")
    writing.print_rows(console, rows, roofline)
    if steps:
        writing.print_steps(console, steps)
    if host:
        writing.print_host_costs(console, host)
    _write(output, writing.as_json(facts, rows, roofline=roofline, host=host, steps=steps))
    if output is not None and not check:
        writing.write_plot(output / "kernels.html", rows)
    failed = [row for row in rows if not row.passed]
    if failed:
        console.print(f"{len(failed)} of {len(rows)} cases are off by more than their tolerance")
        raise typer.Exit(1)
    console.print(f"{len(rows)} cases within tolerance")


def _announced(cases: Iterable[Case]) -> Iterator[Case]:
    """The cases, each shown on stderr while it runs (in a log once per kernel): the interpreter takes minutes."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False)
    said: set[str] = set()
    with console.status("") as status:
        for number, case in enumerate(cases, 1):
            status.update(f"{number}: {case.kernel} {case.shape}")
            if case.kernel not in said and not console.is_terminal:
                console.print(case.kernel, soft_wrap=True)
            said.add(case.kernel)
            yield case


def _device(*, check: bool) -> torch.device:
    """The GPU; without one, the CPU with Triton's interpreter, which must be chosen before Triton is imported."""
    import importlib.util

    if importlib.util.find_spec("triton") is None:
        raise UserError("the kernels need the package triton: pip install 'benchctl[gpu]'")
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if not check:
        raise UserError("timing kernels needs a CUDA device; --check works without one")
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    return torch.device("cpu")


def _write(directory: Path | None, document: str) -> None:
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "kernels.json").write_text(document)
