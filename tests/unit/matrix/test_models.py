"""Models are fetched and checked before the first server starts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchctl.matrix import models
from benchctl.matrix.plan import plan_matrix
from benchctl.matrix.suite import load_suite
from reports.schema import CellConfig
from server.errors import UserError
from tests.unit.matrix.test_suite import MINIMAL, write


def planned(tmp_path: Path, *assignments: str) -> list[CellConfig]:
    plan = plan_matrix(load_suite(write(tmp_path, MINIMAL), assignments))
    return [server.config for server in plan.servers]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ('models=["tyni"]', "model 'tyni': neither a folder"),
        ("server.max_model_len=100000", "--max-model-len 100000: model 'tiny' takes 1 to 4096"),
        ("server.load_format=safetensors", "preset 'tiny' has no weights"),
    ],
)
def test_what_cannot_be_served_is_bad_input(tmp_path: Path, assignment: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        models.ensure_models(planned(tmp_path, assignment), Console(file=io.StringIO()))


def test_models_that_can_be_pulled_are_pulled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[str] = []
    monkeypatch.setattr(models, "must_be_pulled", lambda name: name == "tiny" and not pulled)
    monkeypatch.setattr(models, "pull", lambda name: pulled.append(name) or tmp_path)
    output = io.StringIO()
    models.ensure_models(planned(tmp_path), Console(file=output))
    assert pulled == ["tiny"]
    assert "pulled tiny to" in output.getvalue()


def test_an_endpoints_model_is_its_own_business(tmp_path: Path) -> None:
    url = ['engines=["url"]', "url=http://127.0.0.1:9", 'models=["no such model"]']
    models.ensure_models(planned(tmp_path, *url), Console(file=io.StringIO()))
