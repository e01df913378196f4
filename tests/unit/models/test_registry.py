"""Names and configs: what resolves, and the one line that says why something does not."""

from __future__ import annotations

import json
import os
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
        ({**LLAMA, "num_hidden_layers": "2"}, "`num_hidden_layers` must be a positive number, not '2'"),
        ({**LLAMA, "hidden_size": 10**400}, "`hidden_size` must be a positive number, not 1000"),
        ({**LLAMA, "hidden_size": "x" * 9999}, "`hidden_size` must be a positive number, not 'xxx"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "`num_hidden_layers` 1000000000 is more than any model has"),
        ({**LLAMA, "num_hidden_layers": 1e9}, "`num_hidden_layers` 1000000000 is more than any model has"),
        ({**LLAMA, "num_hidden_layers": 1e300}, "`num_hidden_layers` 1e+300 is more than any model has"),
        ({**LLAMA, "vocab_size": 10**9}, "`vocab_size` 1000000000 is more than any model has"),
        ({**LLAMA, "hidden_size": 2**40}, "`hidden_size` 1099511627776 is more than any model has"),
        ({**LLAMA, "intermediate_size": 2**70}, "`intermediate_size` 1.18059162071741e+21 is more than any model has"),
        ({**LLAMA, "num_attention_heads": 2**40}, "`num_attention_heads` 1099511627776 is more than any model has"),
        ({**LLAMA, "head_dim": 2**40}, "`head_dim` 1099511627776 is more than any model has"),
        ({**LLAMA, "num_attention_heads": 2**16, "head_dim": 2**16}, "65536 attention heads of 65536 are wider than"),
        ({**LLAMA, "num_key_value_heads": 2**40}, "`num_key_value_heads` 1099511627776 is more than any model has"),
        ({**LLAMA, "max_position_embeddings": 2**40}, "`max_position_embeddings` 1099511627776 is more than any model"),
        (
            {**LLAMA, "num_hidden_layers": 4096, "hidden_size": 2**17, "intermediate_size": 2**17},
            "describes a model of 4.2e+14 parameters, which fits no machine",
        ),
        ({**LLAMA, "eos_token_id": list(range(257))}, "`eos_token_id` lists 257 tokens (at most 256)"),
        ({**LLAMA, "eos_token_id": 10**300}, "`eos_token_id` must be a token id"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "`factor` must be a positive number"),
        ({**LLAMA, "torch_dtype": ["x"] * 9999}, "dtype ['x', 'x'"),
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
    assert len(text) < 500, "short, whatever the file holds"


def test_sizes_of_the_largest_models_are_taken() -> None:
    llama_405b = {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 53248,
        "vocab_size": 262144,
        "max_position_embeddings": 10485760,
    }
    config = parse_config({**LLAMA, **llama_405b}, "config.json")
    assert round(config.num_parameters / 1e9) == 410
    written_as_floats = {**LLAMA, **{key: float(value) for key, value in llama_405b.items()}}
    assert parse_config(written_as_floats, "config.json") == config


ALL_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json",
]  # fmt: skip


def resolve_apart(folder: Path) -> str:
    """What a process says that resolves the model in `folder`: it may wait for ever, or read without an end."""
    code = (
        "import sys; from server.config import ModelOptions; from server.errors import UserError\n"
        "from server.models.registry import resolve_model\n"
        "try: resolve_model(ModelOptions(model=sys.argv[1]))\n"
        "except UserError as error: print(error)"
    )
    limited = ["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh"]
    done = subprocess.run(
        [*limited, sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pipe", "a named pipe, not a regular file; put the file itself there"),
        ("device", "a device, not a regular file; put the file itself there"),
        ("directory", "a directory, not a regular file; put the file itself there"),
        ("broken link", "a link to a file that is missing; download the model again"),
        ("loop", "cannot be read (Too many levels of symbolic links)"),
    ],
)
def test_what_is_no_regular_file_is_named(tmp_path: Path, name: str, kind: str, message: str) -> None:
    folder_with(tmp_path, LLAMA, *(["model.safetensors"] if "index" not in name else []))
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "broken link":
        path.symlink_to(tmp_path / "absent")
    else:
        path.symlink_to(path)
    said = resolve_apart(tmp_path)
    expected = "no such file" if (name, kind) == ("config.json", "broken link") else message
    assert said == f"{path}: {expected}\n"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_files_are_read_up_to_a_bound(tmp_path: Path, name: str) -> None:
    folder_with(tmp_path, LLAMA)
    with open(tmp_path / name, "ab") as file:
        file.truncate(1 << 40)
    assert resolve_apart(tmp_path) == (
        f"{tmp_path / name}: longer than 16 MiB, which no such file needs; put the right one there\n"
    )


def test_links_to_regular_files_are_followed(tmp_path: Path) -> None:
    """A hub cache is made of them."""
    (tmp_path / "blobs").mkdir()
    folder_with(tmp_path / "blobs", LLAMA, "model.safetensors", "tokenizer.json")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert resolve_model(ModelOptions(model=str(tmp_path / "snapshot"))).has_tokenizer


@pytest.mark.parametrize("name", ["x" * 300, "pipe", "a\0b"])
def test_a_shard_that_is_no_file_is_named(tmp_path: Path, name: str) -> None:
    folder_with(tmp_path, LLAMA)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(UserError, match=r"File name too long|a named pipe, not a regular|no such file, though"):
        checkpoint_files(tmp_path)


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
