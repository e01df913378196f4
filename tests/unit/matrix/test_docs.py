"""The pages about suites and reports name everything there is, and their example can be run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec

from benchctl.matrix.plan import plan_matrix
from benchctl.matrix.suite import Load, Suite, load_suite, shipped_suites
from reports.metrics import METRICS
from reports.schema import SCHEMA_VERSION, Status

DOCS = Path(__file__).parents[3] / "docs"
MATRIX, REPORTS = ((DOCS / name).read_text(encoding="utf-8") for name in ("matrix.md", "reports.md"))


def test_every_key_of_a_suite_is_described() -> None:
    for type_ in (Suite, Load):
        for field in msgspec.structs.fields(type_):
            assert f"`{field.name}`" in MATRIX, field.name
    for name in (*shipped_suites(), *get_args(Status)):
        assert f"`{name}`" in MATRIX, name


def test_the_example_is_a_suite(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", MATRIX, re.DOTALL)
    path = tmp_path / "example.toml"
    path.write_text(example)
    assert len(plan_matrix(load_suite(str(path))).cells) == 2 * 3 * 4


def test_every_metric_is_described_in_its_own_words() -> None:
    for metric in METRICS.values():
        assert f"| `{metric.key}` | {metric.label} | {metric.definition} |" in REPORTS
    assert f"`schema_version` `{SCHEMA_VERSION}`" in REPORTS
