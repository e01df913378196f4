"""One compiled model for all tests of the package: compiling takes seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from server.compilation.compiler import ModelCompiler
from server.models.decoder import CausalLM
from tests.unit.compilation.models import make_compiler, make_model


@dataclass
class Compiled:
    model: CausalLM
    compiler: ModelCompiler
    """Has run `build`, cold, and `publish`."""
    cache: Path


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    directory = tmp_path_factory.mktemp("compiled")
    model = make_model()
    compiler = make_compiler(model, directory / "cache", directory / "work")
    compiler.build()
    compiler.publish()
    return Compiled(model, compiler, directory / "cache")
