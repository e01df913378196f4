"""The CI templates: valid YAML whose commands exist."""

from __future__ import annotations

import re
from importlib import resources

import pytest
import yaml
from typer.testing import CliRunner

from benchctl.cli import build_app
from benchctl.gate.outputs import FILES

FOLDER = resources.files("reports") / "templates" / "ci"
NAMES = sorted(entry.name for entry in FOLDER.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_yaml_with_commands_that_exist(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert yaml.safe_load(text)
    # The action's flags stand in a bash array.
    commands = re.findall(r"benchctl (gate|matrix|history \w+) (.*)", text.replace("arguments=(", "benchctl gate "))
    for command, rest in commands:
        shown = CliRunner().invoke(
            build_app([command.split()[0]]), [*command.split(), "--help"], env={"COLUMNS": "200"}
        )
        for flag in re.findall(r"--[a-z-]+", rest):
            assert flag in shown.output, f"{name}: benchctl {command} has no {flag}"
    for path in re.findall(r"benchctl-gate/([\w.-]+\.(?:xml|json|txt))", text):
        assert path in FILES


def test_all_templates_ship() -> None:
    assert NAMES == ["action.yml", "github-nightly.yml", "github-pull-request.yml", "gitlab-ci.yml"]
