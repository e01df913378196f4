"""`docs/faults.md` promises tests: they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`([a-z_/]+)::([a-z0-9_]+)`", (ROOT / "docs" / "faults.md").read_text())


def test_the_table_names_tests() -> None:
    assert len(NAMED) > 50


@pytest.mark.parametrize(("module", "name"), NAMED)
def test_the_named_test_exists(module: str, name: str) -> None:
    folder, _, stem = module.rpartition("/")
    text = (ROOT / "tests" / folder / f"test_{stem}.py").read_text()
    assert re.search(rf"^(async )?def test_{name}\(", text, re.MULTILINE)
