"""Runs pairs until the answer is plain: interleaved, each run a process of its own, every result kept."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchctl.gate.judge import Judgement, judge, plan_for
from benchctl.gate.pairing import SIDES, Side, run_order
from benchctl.gate.runs import Run, load_run
from benchctl.gate.samples import gated_comparisons
from benchctl.gate.settings import GateSettings
from benchctl.gate.sources import Source
from benchctl.gate.validity import disturbances
from benchctl.targets.process import ServerProcess
from reports import formatting
from reports.results import explain_os_error
from server.errors import UserError

_INTERRUPTED_EXIT = 130
_STOP_S = 60.0
# A cell that fails once may have been unlucky; a second pair tells.
_PAIRS_TO_GIVE_UP = 2


class RunFailedError(UserError):
    """A run that left no results: the candidate's is a failure (1), the baseline's makes the gate inconclusive (3)."""

    def __init__(self, side: Side, text: str) -> None:
        super().__init__(text)
        self.exit_code = 1 if side == "candidate" else 3


@dataclass(slots=True)
class Session:
    """One gate over two sources; `run()` returns what the pairs say."""

    sources: dict[Side, Source]
    settings: GateSettings
    output: Path
    seed: int
    ignore: Collection[str] = ()
    say: Callable[[str], None] = print
    pairs: list[tuple[Run, Run]] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    """Why pairs were run again, a line each."""

    @property
    def order(self) -> list[tuple[Side, Side]]:
        return run_order(self.settings.max_pairs, self.seed)

    def run(self) -> Judgement:
        """Run pairs, look at the planned times, stop at an answer.

        Raises UserError when a run cannot be made, IncomparableError when the sides do different work. An interrupt
        passes through after the run in progress was stopped; results so far stay in `output`.
        """
        make_fresh_output(self.output)
        judgement = Judgement(None, ["no pair was run"])
        while len(self.pairs) < self.settings.max_pairs:
            self._run_pair(len(self.pairs))
            judgement = self._look()
            given_up = judgement.verdict in ("failed", "inconclusive") and len(self.pairs) >= _PAIRS_TO_GIVE_UP
            if given_up or judgement.verdict in ("pass", "regression"):
                return judgement
        return judgement

    def run_all(self) -> None:
        """Run `max_pairs` pairs without looking (calibration). Raises as `run()` does."""
        make_fresh_output(self.output)
        while len(self.pairs) < self.settings.max_pairs:
            self._run_pair(len(self.pairs))

    def _look(self) -> Judgement:
        settings, n = self.settings, len(self.pairs)
        family = len(gated_comparisons(self.pairs, settings))
        looks = plan_for(settings.min_pairs, settings.max_pairs, settings, family)
        if n in {look.pairs for look in looks}:
            judgement = judge(self.pairs, settings, looks=looks, ignore=self.ignore)
            self.say(f"look after {n} pairs: {judgement.verdict or 'undecided'}")
            return judgement
        # Between looks only the validity counts: an early answer here would spend error that is not accounted for.
        judgement = judge(self.pairs, settings, ignore=self.ignore)
        return judgement if judgement.verdict in ("failed", "inconclusive") else Judgement(None, judgement.reasons)

    def _run_pair(self, number: int) -> None:
        began = time.monotonic()
        runs: dict[Side, Run] = {}
        for side in self.order[number]:
            runs[side] = self._run_side(side, number)
        pair = runs["baseline"], runs["candidate"]
        disturbed = disturbances(pair)
        if disturbed and len(self.discarded) < self.settings.max_disturbed:
            for run in pair:
                shutil.rmtree(run.path, ignore_errors=True)
            self.discarded.append(f"pair {number + 1} was run again: {disturbed[0]}")
            self.say(self.discarded[-1])
            self._run_pair(number)
            return
        self.pairs.append(pair)
        if len(self.pairs) == 1:
            took = time.monotonic() - began
            least, most = (
                formatting.seconds(took * count) for count in (self.settings.min_pairs, self.settings.max_pairs)
            )
            span = least if least == most else f"{least} to {most}"
            self.say(f"a pair takes {formatting.seconds(took)}: an answer in {span}")

    def _run_side(self, side: Side, number: int) -> Run:
        source = self.sources[side]
        output = self.output / side / f"{number:02d}"
        log = self.output / "logs" / f"{side}-{number:02d}.log"
        began = time.monotonic()
        invocation = source.invocation(output)
        try:
            process = ServerProcess(invocation.argv, log_path=log, env=invocation.env)
        except OSError as error:
            raise UserError(f"{side}: cannot run {invocation.argv[0]}: {error.strerror}") from None
        try:
            code = process.wait()
        except BaseException:
            process.stop(_STOP_S)
            raise
        if code == _INTERRUPTED_EXIT:
            raise KeyboardInterrupt
        run = self._load(side, output, code, process.log_tail(3), log)
        for result in run.cells.values():
            if source.commit is not None and result.provenance.git_commit != source.commit:
                raise UserError(
                    f"{side}: the results come from commit {str(result.provenance.git_commit)[:12]}, not "
                    f"{source.commit[:12]}: another copy of benchctl was imported"
                )
        self.say(f"pair {number + 1}/{self.settings.max_pairs}: {side} in {time.monotonic() - began:.0f} s")
        return run

    def _load(self, side: Side, output: Path, code: int, tail: Sequence[str], log: Path) -> Run:
        # Exit code 1 is a cell that failed: its result says why, and the judge counts it.
        if code not in (0, 1) or not output.is_dir():
            last = tail[-1].strip() if tail else "no output"
            raise RunFailedError(side, f"the {side}'s run ended with status {code}: {last} (whole log: {log})")
        try:
            return load_run(output)
        except UserError as error:
            raise RunFailedError(side, f"the {side}'s run left no results: {error} (log: {log})") from None


def make_fresh_output(output: Path) -> None:
    """Make the directory of a gate. Raises UserError when it holds runs already or cannot be written."""
    for side in SIDES:
        if (output / side).exists():
            raise UserError(
                f"--output {output}: holds the runs of an earlier gate; choose another directory or remove it (to "
                f"judge those runs again: benchctl gate {output}/baseline {output}/candidate)"
            )
    try:
        for side in SIDES:
            (output / side).mkdir(parents=True)
        (output / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(explain_os_error(output, error)) from error
