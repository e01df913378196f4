"""The key of a compiled graph, and the explanation of a miss."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from server.compilation import factors as module
from server.compilation.factors import cache_key, collect, explain, model_factors, source_factors
from server.compilation.store import EntryInfo
from server.models.config import ModelConfig, RopeConfig
from tests.unit.compilation.models import LLAMA


def collected(config: ModelConfig = LLAMA, **changes: object) -> dict[str, str]:
    settings: dict[str, object] = {
        "device_type": "cpu",
        "dtype": torch.float32,
        "max_positions": 64,
        "token_budget": 24,
        "custom_ops": "auto",
    }
    return collect(config, **(settings | changes))  # type: ignore[arg-type]


def entry(factors: dict[str, str], modified: float = 0.0) -> EntryInfo:
    return EntryInfo(key=cache_key(factors), bytes=1, modified=modified, factors=factors)


def test_every_setting_changes_the_key() -> None:
    keys = {cache_key(collected())}
    keys |= {cache_key(collected(**{name: value})) for name, value in (
        ("dtype", torch.bfloat16), ("max_positions", 65), ("token_budget", 25), ("custom_ops", "on"),
    )}  # fmt: skip
    keys.add(cache_key(collected(msgspec.structs.replace(LLAMA, qkv_bias=True))))
    keys.add(cache_key(collected(msgspec.structs.replace(LLAMA, rope=RopeConfig(theta=5.0)))))
    assert len(keys) == 7
    assert cache_key(collected()) in keys


def test_what_a_forward_pass_does_not_depend_on_is_left_out() -> None:
    other = msgspec.structs.replace(LLAMA, eos_token_ids=(7,), bos_token_id=3, dtype="float16")
    assert model_factors(other) == model_factors(LLAMA)


def test_an_edited_source_file_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_factors()
    assert "source server/models/decoder.py" in before
    assert "source server/layers/rotary.py" in before
    package = tmp_path / "server"
    for name in before:
        copy = tmp_path / name.removeprefix("source ")
        copy.parent.mkdir(parents=True, exist_ok=True)
        original = Path(module.server.__file__).parent.parent / name.removeprefix("source ")
        copy.write_bytes(original.read_bytes())
    (package / "__init__.py").touch()
    monkeypatch.setattr(module.server, "__file__", str(package / "__init__.py"))
    assert source_factors() == before
    with open(package / "layers" / "norm.py", "a") as file:
        file.write("# edited\n")
    after = source_factors()
    assert {name for name in before if before[name] != after[name]} == {"source server/layers/norm.py"}


def test_explanations() -> None:
    ours = collected()
    assert explain(ours, [entry(ours)]) == [f"hit: entry {cache_key(ours)}"]
    assert explain(ours, [])[0].startswith("miss: the cache is empty")
    unreadable = EntryInfo(key="x", bytes=1, modified=9.0, factors={})
    assert explain(ours, [unreadable])[0].startswith("miss: the cache is empty")
    far = collected(dtype=torch.bfloat16, max_positions=128, token_budget=48)
    near = {name: value for name, value in collected(token_budget=48).items() if name != "python"}
    lines = explain(ours, [entry(far, 2.0), entry(near, 1.0)])
    assert lines[0].endswith(f"2 factor(s) differ from the nearest, {cache_key(near)}")
    assert lines[1:] == [f"  python: (absent) -> {ours['python']}", "  token_budget: 48 -> 24"]
