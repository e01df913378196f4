"""JUnit XML of a gate: a test case per cell and metric, which every CI system can show."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from reports.verdict import GateVerdict, MetricVerdict
from reports.verdict_text import explain

# Characters that XML 1.0 cannot hold, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(verdict: GateVerdict) -> str:
    """One suite per cell; a regression is a failure, an inconclusive metric an error (never a pass)."""
    cells = list(dict.fromkeys(one.cell_id for one in verdict.metrics))
    root = ElementTree.Element("testsuites", name="benchctl gate")
    counts = [_suite(root, cell, [one for one in verdict.metrics if one.cell_id == cell], verdict) for cell in cells]
    # Without a case of its own a verdict that no metric explains (a run that is not valid) would look like a pass.
    counts.append(_overall(root, verdict))
    for name, total in zip(("tests", "failures", "errors"), map(sum, zip(*counts, strict=True)), strict=True):
        root.set(name, str(total))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(
    root: ElementTree.Element, cell: str, metrics: list[MetricVerdict], verdict: GateVerdict
) -> tuple[int, int, int]:
    suite = ElementTree.SubElement(root, "testsuite", name=_clean(cell))
    failures = errors = 0
    for one in metrics:
        case = ElementTree.SubElement(suite, "testcase", classname=_clean(cell), name=_clean(one.label))
        if one.outcome == "regression":
            failures += 1
            failure = ElementTree.SubElement(case, "failure", type="regression", message=_clean(explain(one)))
            failure.text = _clean(_runs(one))
        elif one.outcome == "invalid" or (one.outcome == "undecided" and verdict.verdict != "regression"):
            errors += 1
            ElementTree.SubElement(case, "error", type="inconclusive", message=_clean(explain(one)))
        else:
            ElementTree.SubElement(case, "system-out").text = _clean(explain(one))
    _counts(suite, len(metrics), failures, errors)
    return len(metrics), failures, errors


def _overall(root: ElementTree.Element, verdict: GateVerdict) -> tuple[int, int, int]:
    suite = ElementTree.SubElement(root, "testsuite", name="gate")
    case = ElementTree.SubElement(suite, "testcase", classname="gate", name="verdict")
    if verdict.duration_s is not None:
        case.set("time", f"{verdict.duration_s:.3f}")
    failed, unsure = int(verdict.verdict in ("regression", "failed")), int(verdict.verdict == "inconclusive")
    if failed or unsure:
        tag, kind = ("failure", verdict.verdict) if failed else ("error", "inconclusive")
        element = ElementTree.SubElement(case, tag, type=kind, message=_clean(verdict.summary))
        element.text = _clean("\n".join(verdict.reasons))
    else:
        ElementTree.SubElement(case, "system-out").text = _clean(verdict.summary)
    _counts(suite, 1, failed, unsure)
    return 1, failed, unsure


def _counts(suite: ElementTree.Element, tests: int, failures: int, errors: int) -> None:
    for name, value in (("tests", tests), ("failures", failures), ("errors", errors), ("skipped", 0)):
        suite.set(name, str(value))


def _runs(one: MetricVerdict) -> str:
    return f"baseline runs: {one.baseline_runs}\ncandidate runs: {one.candidate_runs}\np = {one.p} (level {one.level})"


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
