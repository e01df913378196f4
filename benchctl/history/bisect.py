"""Where to look for the commit that changed a metric, between two commits of which one is good and one is bad."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchctl.gate.revisions import repository_root, resolve_revision
from benchctl.history.record import Record
from benchctl.history.series import Series, build_series
from reports.metrics import Metric
from server.errors import UserError


@dataclass(frozen=True, slots=True)
class Hint:
    """The narrowest range that the history leaves for a series, and what to do next."""

    series: Series
    good: str
    bad: str
    change: float
    commits: list[str]
    """Commits of the range, oldest first: `bad` and those between; the culprit is one of them."""
    next_commit: str | None
    """The one to measure next; None when the range is a single commit."""


def bisect_hints(records: Sequence[Record], metric: Metric, good: str, bad: str, directory: Path) -> list[Hint]:
    """A hint per series that got worse between two revisions of the checkout around `directory`, worst first.

    Raises UserError: no checkout, unknown revisions, `good` no ancestor of `bad`, or nothing measured in the range.
    """
    repository = repository_root(directory)
    first, last = (resolve_revision(repository, revision, "history bisect") for revision in (good, bad))
    line = _ancestry(repository, first, last)
    if not line:
        raise UserError(f"history bisect: {good} is not an ancestor of {bad}, or is the same commit")
    # In the order of the commit graph: times of commits may be equal or wrong.
    place = {commit: index for index, commit in enumerate([first, *line])}
    inside = [record for record in records if record.commit in place]
    hints = []
    measured = build_series(inside, metric)
    if not any(len(series.points) > 1 for series in measured):
        commits = {record.commit for record in inside}
        found = "nothing was measured" if not commits else f"no cell has {metric.key} of two commits"
        raise UserError(f"history bisect: {found} from {good} to {bad}; measure both ends first")
    for series in measured:
        series.points.sort(key=lambda point: place[point.commit])
        hint = _hint(series, line, place)
        if hint is not None:
            hints.append(hint)
    return sorted(hints, key=lambda hint: -abs(hint.change))


def bisect_command(hint: Hint, suite: str) -> str:
    """A shell command that lets git and the gate find the commit: inconclusive gates are skipped (125)."""
    gate = f"benchctl gate --base-rev {hint.good[:12]} --candidate-rev BISECT_HEAD --suite {shlex.quote(suite)}"
    script = f'{gate} --output "$(mktemp -d)/gate"; code=$?; [ $code -eq 3 ] && exit 125; exit $code'
    start = f"git bisect start --no-checkout {hint.bad[:12]} {hint.good[:12]}"
    return f"{start} && git bisect run sh -c {shlex.quote(script)}"


def _hint(series: Series, line: Sequence[str], place: dict[str, int]) -> Hint | None:
    points = series.points
    if len(points) < 2:
        return None
    # The largest single step for the worse between neighbouring measured commits.
    steps = [(points[i + 1].value / points[i].value - 1, i) for i in range(len(points) - 1) if points[i].value > 0]
    worse = [(change, i) for change, i in steps if (change < 0) == series.metric.higher_is_better and change != 0]
    if not worse:
        return None
    change, at = max(worse, key=lambda step: abs(step[0]))
    before, after = points[at].commit, points[at + 1].commit
    commits = list(line[place[before] : place[after]])
    middle = commits[(len(commits) - 1) // 2] if len(commits) > 1 else None
    return Hint(series, before, after, change, commits, middle)


def _ancestry(repository: Path, first: str, last: str) -> list[str]:
    """Commits after `first` up to `last` along first parents, oldest first; empty when `first` is no ancestor."""
    command = ["git", "-C", str(repository), "rev-list", "--first-parent", "--reverse", f"{first}..{last}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    check = ["git", "-C", str(repository), "merge-base", "--is-ancestor", first, last]
    is_ancestor = subprocess.run(check, capture_output=True, check=False).returncode == 0
    return done.stdout.split() if done.returncode == 0 and is_ancestor else []
