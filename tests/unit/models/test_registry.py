"""Names and configs: what resolves, and the one line that says why something does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.config import ModelOptions
from server.errors import UserError
from server.models.config import parse_config
from server.models.registry import PRESETS, checkpoint_files, resolve_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def folder_with(tmp_path: Path, config: object, *files: str) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for file in files:
        (tmp_path / file).write_bytes(b"")
    return tmp_path


def test_presets_have_their_published_sizes() -> None:
    millions = {name: round(config.num_parameters / 1e6) for name, config in PRESETS.items()}
    assert millions == {"tiny": 0, "llama-3.1-8b": 8030, "llama-3.2-1b": 1236, "qwen3-0.6b": 596}
    resolved = resolve_model(ModelOptions(model="tiny"))
    assert (resolved.path, resolved.load_format, resolved.has_tokenizer) == (None, "dummy", False)


def test_resolving_imports_no_torch() -> None:
    code = (
        "import sys; from server.models.registry import resolve_model; from server.config import ModelOptions; "
        "import server.models.pull; resolve_model(ModelOptions()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_folder(tmp_path: Path) -> None:
    folder_with(tmp_path, LLAMA, "model.safetensors", "tokenizer.json")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    resolved = resolve_model(ModelOptions(model=str(tmp_path), max_model_len=100))
    assert (resolved.path, resolved.load_format, resolved.has_tokenizer) == (tmp_path, "safetensors", True)
    assert (resolved.max_model_len, resolved.config.head_dim, resolved.config.dtype) == (100, 8, "bfloat16")
    assert resolved.config.eos_token_ids == (7, 2)


def test_pulled_name_comes_before_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHCTL_CACHE_DIR", str(tmp_path / "cache"))
    pulled = tmp_path / "cache" / "models" / "mine"
    pulled.mkdir(parents=True)
    folder_with(pulled, LLAMA, "model.safetensors")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(ModelOptions(model="mine")).path == pulled


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("default", 10000.0)),
        ({"rope_theta": 5e5}, ("default", 5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 7.0}, ("linear", 7.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, ("default", 9.0)),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 3.0,
                    "factor": 8,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 128,
                }
            },
            ("llama3", 3.0),
        ),
    ],
)
def test_rope_spellings(changes: dict[str, Any], expected: tuple[str, float]) -> None:
    rope = parse_config({**LLAMA, **changes}, "config.json").rope
    assert (rope.kind, rope.theta) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a JSON list"),
        ("[" * 100000, "not valid JSON"),
        ({**LLAMA, "architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({**LLAMA, "architectures": []}, "`architectures` must be"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "`hidden_size` is missing"),
        ({**LLAMA, "hidden_size": "big"}, "`hidden_size` must be a positive number, not 'big'"),
        ({**LLAMA, "vocab_size": 10.5}, "`vocab_size` must be a whole number"),
        ({**LLAMA, "num_hidden_layers": True}, "`num_hidden_layers` must be a positive number"),
        ({**LLAMA, "num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({**LLAMA, "hidden_size": 34}, "hidden_size 34 is not a multiple"),
        ({**LLAMA, "head_dim": 7}, "head_dim 7 is odd"),
        ({**LLAMA, "hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "`tie_word_embeddings` must be true or false"),
        ({**LLAMA, "torch_dtype": "int8"}, "dtype 'int8' is not supported"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantised checkpoints are not supported"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "`factor` is missing"),
        ({**LLAMA, "rope_parameters": {"full": {"rope_theta": 1.0}}}, "must be one object for all layers"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({**LLAMA, "eos_token_id": "</s>"}, "`eos_token_id` must be a token id"),
        (LLAMA, "model.safetensors: no such file"),
    ],
)
def test_bad_folder_is_one_line(tmp_path: Path, config: object, message: str) -> None:
    folder_with(tmp_path, config)
    with pytest.raises(UserError) as caught:
        resolve_model(ModelOptions(model=str(tmp_path)))
    text = str(caught.value)
    assert message in text
    assert str(tmp_path) in text
    assert "\n" not in text


def test_sliding_window_is_refused_beyond_its_span(tmp_path: Path) -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    folder_with(tmp_path, mistral, "model.safetensors")
    with pytest.raises(UserError, match="--max-model-len 64 or less"):
        resolve_model(ModelOptions(model=str(tmp_path)))
    assert resolve_model(ModelOptions(model=str(tmp_path), max_model_len=64)).max_model_len == 64
    qwen = {**mistral, "architectures": ["Qwen2ForCausalLM"]}
    assert parse_config(qwen, "c").sliding_window is None
    assert parse_config({**qwen, "use_sliding_window": True, "max_window_layers": 1}, "c").sliding_window == 64
    assert parse_config({**qwen, "use_sliding_window": True, "max_window_layers": 2}, "c").sliding_window is None


@pytest.mark.parametrize("length", [0, 513])
def test_context_beyond_the_model(tmp_path: Path, length: int) -> None:
    folder_with(tmp_path, LLAMA, "model.safetensors")
    with pytest.raises(UserError, match=f"--max-model-len {length}: .* takes 1 to 512 tokens"):
        resolve_model(ModelOptions(model=str(tmp_path), max_model_len=length))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder_with(tmp_path, LLAMA, "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(UserError, match=r"b\.safetensors: no such file"):
        checkpoint_files(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"")
    assert [p.name for p in checkpoint_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "name is empty"),
        ("no-such-model", "neither a folder, nor a pulled model, nor a preset"),
        ("/no/such/folder", "neither a folder"),
        ("./no/such", "neither a folder"),
        ("a/b/c", "neither a folder"),
        ("smollm2-135m", "run `benchctl models pull smollm2-135m`"),
    ],
)
def test_unknown_names(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHCTL_CACHE_DIR", str(tmp_path))
    with pytest.raises(UserError, match=message):
        resolve_model(ModelOptions(model=name))


def test_preset_has_no_weights_to_load() -> None:
    with pytest.raises(UserError, match="has no weights"):
        resolve_model(ModelOptions(model="tiny", load_format="safetensors"))
