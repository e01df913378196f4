"""One gate from start to verdict: given results, or runs of two sources made here."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import benchctl
from benchctl.gate.comparable import IncomparableError
from benchctl.gate.judge import Judgement, conclude, judge
from benchctl.gate.pairing import Side
from benchctl.gate.revisions import interpreter, repository_root, resolve_revision, worktree
from benchctl.gate.runs import Run, load_runs
from benchctl.gate.session import RunFailedError, Session
from benchctl.gate.settings import GateSettings, check_settings
from benchctl.gate.sources import CheckoutSource, CommandSource, Source, is_checkout, require_checkout
from benchctl.gate.suite_file import without_gate, write_portable_suite
from benchctl.matrix.suite import load_suite
from benchctl.provenance import collect_provenance
from reports.results import explain_os_error
from reports.verdict import GateVerdict, SideInfo
from server.errors import UserError

DEFAULT_SUITE = "gate"


@dataclass(frozen=True, slots=True)
class SideRequest:
    """What was asked for one side; at most one of the three."""

    path: Path | None = None
    """Results, or a checkout."""
    revision: str | None = None
    command: str | None = None

    @property
    def given(self) -> bool:
        return any(value is not None for value in (self.path, self.revision, self.command))


@dataclass(frozen=True, slots=True)
class GateRequest:
    """Everything that `benchctl gate` was asked."""

    baseline: SideRequest
    candidate: SideRequest
    settings: GateSettings
    output: Path
    suite: str = DEFAULT_SUITE
    assignments: Sequence[str] = ()
    seed: int | None = None
    """Of the order of runs; None: drawn."""
    ignore: Collection[str] = ()
    say: Callable[[str], None] = field(default=print)


def load_settings(
    suite: str | None, assignments: Sequence[str], max_pairs: int | None, *, runs_suite: bool = True
) -> GateSettings:
    """The `[gate]` settings of a suite, with `--max-pairs` on top. Raises UserError as `load_suite` does.

    Where no suite is named and none is run (`runs_suite`: results are given, or commands that write some), the default
    minimum effects hold: those of the suite `gate` are made for its own cells.
    """
    settings = load_suite(suite or DEFAULT_SUITE, assignments).gate
    if not (suite or runs_suite or any(item.startswith("gate.min_effect") for item in assignments)):
        settings = msgspec.structs.replace(settings, min_effect=None)
    if max_pairs is not None:
        settings = msgspec.structs.replace(settings, max_pairs=max_pairs, min_pairs=min(settings.min_pairs, max_pairs))
        check_settings(settings, "--max-pairs")
    return settings


def are_results(base: SideRequest, new: SideRequest, *, calibrate: bool) -> bool:
    """Whether both sides are results. Raises UserError for sides that do not go together."""
    for side, name in ((base, "baseline"), (new, "candidate")):
        if sum(value is not None for value in (side.path, side.revision, side.command)) > 1:
            raise UserError(f"gate: the {name} is given twice; choose a path, a revision or a command")
        if side.path is not None and not side.path.exists():
            raise UserError(f"{side.path}: no such result directory, file or checkout")
    if not base.given and not calibrate:
        raise UserError("gate: name a baseline: results, a checkout, --base-rev REV or --base-command CMD")
    results = [side.path is not None and not is_checkout(side.path) for side in (base, new)]
    if results[0] and not new.given:
        raise UserError(f"gate: name a candidate to compare {base.path} with")
    if any(results) and not all(results):
        raise UserError("gate: results on one side only; give results for both, or something to run for both")
    if base.command is not None and not (new.given or calibrate):
        raise UserError("gate: --base-command needs a candidate, e.g. --candidate-command CMD")
    if calibrate and new.given and not results[1]:
        raise UserError("gate: --calibrate runs one side against itself; give no candidate")
    return all(results)


def calibration_pairs(request: GateRequest, *, results: bool) -> list[tuple[Run, Run]]:
    """A/A pairs: given ones, or `max_pairs` of them made here. Raises UserError as the gates do."""
    if results:
        assert request.baseline.path is not None
        assert request.candidate.path is not None
        return list(zip(load_runs(request.baseline.path), load_runs(request.candidate.path), strict=False))
    with prepared_session(dataclasses.replace(request, candidate=request.baseline)) as session:
        session.run_all()
        return session.pairs


def gate_results(request: GateRequest) -> GateVerdict:
    """Judge results that are there already. Raises UserError when they cannot be read."""
    base, new = request.baseline.path, request.candidate.path
    assert base is not None
    assert new is not None
    base_runs, new_runs = load_runs(base), load_runs(new)
    pairs = list(zip(base_runs, new_runs, strict=False))
    try:
        judgement = judge(pairs, request.settings, ignore=request.ignore)
    except IncomparableError as error:
        judgement = Judgement("inconclusive", [str(error)])
    verdict = conclude(
        judgement,
        request.settings,
        baseline=SideInfo(label=str(base)),
        candidate=SideInfo(label=str(new)),
        pairs=pairs,
        max_pairs=len(pairs),
    )
    if unpaired := abs(len(base_runs) - len(new_runs)):
        verdict.warnings.append(f"{unpaired} runs have no partner on the other side and were left out")
    return verdict


def gate_sources(request: GateRequest) -> GateVerdict:
    """Run both sides in pairs and judge them.

    Raises UserError when a source cannot be made or run; KeyboardInterrupt after an interrupt, with nothing left
    running and the results so far in the output directory.
    """
    began = time.monotonic()
    with prepared_session(request) as session:
        try:
            judgement = session.run()
        except (RunFailedError, IncomparableError) as error:
            failed = isinstance(error, RunFailedError) and error.exit_code == 1
            judgement = Judgement("failed" if failed else "inconclusive", [str(error)])
        verdict = conclude(
            judgement,
            request.settings,
            baseline=session.sources["baseline"].info,
            candidate=session.sources["candidate"].info,
            pairs=session.pairs,
            max_pairs=request.settings.max_pairs,
            order=session.order,
            order_seed=session.seed,
        )
    verdict.warnings += session.discarded
    verdict.suite = request.suite
    verdict.duration_s = time.monotonic() - began
    if verdict.provenance is None:
        verdict.provenance = collect_provenance()
    return verdict


@contextlib.contextmanager
def prepared_session(request: GateRequest) -> Iterator[Session]:
    """A session whose sources are ready to run; worktrees and environments go when it ends."""
    try:
        request.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(explain_os_error(request.output, error)) from error
    suite = write_portable_suite(request.suite, request.output).resolve()
    with contextlib.ExitStack() as stack:
        sources: dict[Side, Source] = {
            "baseline": _source(request.baseline, "--base", request, suite, stack),
            "candidate": _source(request.candidate, "--candidate", request, suite, stack),
        }
        seed = secrets.randbelow(2**31) if request.seed is None else request.seed
        yield Session(sources, request.settings, request.output, seed, ignore=request.ignore, say=request.say)


def _source(side: SideRequest, flag: str, request: GateRequest, suite: Path, stack: contextlib.ExitStack) -> Source:
    if side.command is not None:
        return CommandSource(side.command, f"{flag}-command")
    assignments = without_gate(request.assignments)
    if side.revision is not None:
        repository = repository_root(Path.cwd())
        commit = resolve_revision(repository, side.revision, f"{flag}-rev")
        tree = require_checkout(stack.enter_context(worktree(repository, commit)), f"{flag}-rev {side.revision}")
        python = stack.enter_context(interpreter(tree, _own_tree(repository)))
        source = CheckoutSource(tree, suite, side.revision, assignments, python=python, commit=commit, dirty=False)
    else:
        tree = require_checkout(side.path, flag.lstrip("-")) if side.path is not None else working_tree()
        source = CheckoutSource(tree, suite, str(tree), assignments)
    source.prepare()
    return source


def working_tree() -> Path:
    """The checkout around the current directory, else the installed benchctl."""
    with contextlib.suppress(UserError):
        root = repository_root(Path.cwd())
        if is_checkout(root):
            return root
    return Path(benchctl.__file__).resolve().parents[1]


def _own_tree(repository: Path) -> Path:
    """The tree whose dependencies the running interpreter has, as far as that can be told."""
    installed = Path(benchctl.__file__).resolve().parents[1]
    return installed if (installed / "pyproject.toml").is_file() else repository
