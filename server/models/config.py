"""A model's architecture, parsed from Hugging Face's `config.json`. Imports no torch (the API and CLI use it)."""

from __future__ import annotations

import json
import math
import reprlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from server.errors import UserError
from server.models.files import is_there, read_bounded

CheckpointDtype = Literal["float32", "bfloat16", "float16"]

_MISSING = object()

# Beyond what any published model of these families has (405B parameters, 126 layers, a width of 53248, a vocabulary of
# 262144 tokens, a context of 10M), and within what can be built and indexed. A `config.json` that asks for more is
# broken or malicious: it is refused before anything of such a size is made.
_MAX_LAYERS = 4096
_MAX_WIDTH = 1 << 20
_MAX_VOCAB = 1 << 21
_MAX_CONTEXT = 1 << 24
_MAX_PARAMETERS = 4 * 10**12
_MAX_END_TOKENS = 256
_MAX_EXACT = 1 << 53
"""JSON numbers beyond are not whole numbers to everybody who reads them."""

_CURE = "use the `config.json` that came with the weights"

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 60


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: base frequency and how it is stretched for long contexts."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    """`linear`, `llama3`: by how much the context is stretched."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """`llama3`: the context before stretching."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer of the Llama family. Sizes are counts of elements."""

    architecture: str
    """Key of `ARCHITECTURES`, e.g. `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotary embedding (Qwen3)."""
    rope: RopeConfig = RopeConfig()
    sliding_window: int | None = None
    """Attention span of the checkpoint; the server runs only contexts within it."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: CheckpointDtype = "bfloat16"
    """Precision of the checkpoint."""

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        q, kv, h = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.hidden_size
        attention = h * (q + 2 * kv) + q * h + self.qkv_bias * (q + 2 * kv) + self.o_bias * h
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * h * self.intermediate_size + self.mlp_bias * (2 * self.intermediate_size + h)
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + 2 * h) + h + embeddings


# Architecture in `config.json` -> what that family fixes outside the file.
ARCHITECTURES: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
}


class _Fields:
    """Typed reads from a JSON object; a wrong or missing value is a `UserError` that names file and key."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def error(self, text: str) -> UserError:
        return UserError(f"{self.where}: {text}")

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self.raw.get(key)
        if value is None:
            if default is _MISSING:
                raise self.error(f"`{key}` is missing")
            return float(default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value) or value <= 0:
            raise self.error(f"`{key}` must be a positive number, not {_shown.repr(value)}")
        return float(value)

    def size(self, key: str, default: int | None = None, *, most: int = _MAX_EXACT) -> int:
        """A count of 1 to `most`; Python's writers of JSON may have made a float of it (`64.0`)."""
        value = self.number(key, _MISSING if default is None else default)
        if value != int(value):
            raise self.error(f"`{key}` must be a whole number, not {value!r}")
        if value > most:
            raise self.error(f"`{key}` {value:.15g} is more than any model has (at most {most}); {_CURE}")
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"`{key}` must be true or false, not {_shown.repr(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or null."""
        value = self.raw.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v <= _MAX_EXACT for v in values):
            raise self.error(f"`{key}` must be a token id or a list of them, not {_shown.repr(value)}")
        if len(values) > _MAX_END_TOKENS:
            raise self.error(f"`{key}` lists {len(values)} tokens (at most {_MAX_END_TOKENS}); {_CURE}")
        return tuple(values)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. UserError if the file cannot be read (see `read_bounded`) or holds something else."""
    data = read_bounded(path)
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); download the model again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds a JSON {type(raw).__name__}, not an object")
    return raw


def load_config(folder: Path) -> ModelConfig:
    """Parse `config.json` of a checkpoint folder, and the end tokens of `generation_config.json` if it is there."""
    path = folder / "config.json"
    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path) if is_there(generation_path) else None
    return parse_config(read_json_object(path), str(path), generation)


def parse_config(raw: dict[str, Any], where: str, generation: dict[str, Any] | None = None) -> ModelConfig:
    """`ModelConfig` of the decoded `config.json`; `where` names it in errors.

    End tokens are those of `generation_config.json` (an instruct model's end-of-turn token is often only there)
    followed by those of `config.json`. Raises UserError for anything that this server could only run wrongly.
    """
    fields = _Fields(raw, where)
    architecture = _architecture(fields)
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise fields.error(f"activation {_shown.repr(act)} is not supported (only silu)")
    hidden, heads = fields.size("hidden_size", most=_MAX_WIDTH), fields.size("num_attention_heads", most=_MAX_WIDTH)
    kv_heads = fields.size("num_key_value_heads", heads, most=_MAX_WIDTH)
    if heads % kv_heads:
        raise fields.error(f"{heads} attention heads cannot share {kv_heads} key/value heads evenly")
    if raw.get("head_dim") is None and hidden % heads:
        raise fields.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = fields.size("head_dim", hidden // heads, most=_MAX_WIDTH)
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; the rotary embedding needs an even one")
    if heads * head_dim > _MAX_WIDTH:
        raise fields.error(
            f"{heads} attention heads of {head_dim} are wider than in any model (together {_MAX_WIDTH}); {_CURE}"
        )
    max_positions = fields.size("max_position_embeddings", 2048, most=_MAX_CONTEXT)
    fixed = ARCHITECTURES[architecture]
    # Llama and Qwen3 put `attention_bias` on all four projections; Qwen2 always has it on q, k and v alone.
    bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.flag("attention_bias", False)
    eos = fields.token_ids("eos_token_id")
    if generation is not None:
        eos = (
            _Fields(generation, where.replace("config.json", "generation_config.json")).token_ids("eos_token_id") + eos
        )
    vocab = fields.size("vocab_size", most=_MAX_VOCAB)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=fields.size("num_hidden_layers", most=_MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size", most=_MAX_WIDTH),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=fixed.get("qkv_bias", False) or bias,
        o_bias=bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        qk_norm=fixed.get("qk_norm", False),
        rope=_rope(fields, max_positions),
        sliding_window=_sliding_window(fields, architecture),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(t for t in eos if t < vocab)),
        dtype=_dtype(fields),
    )
    if config.num_parameters > _MAX_PARAMETERS:
        raise fields.error(
            f"describes a model of {config.num_parameters:.2g} parameters, which fits no machine "
            f"(at most {_MAX_PARAMETERS:.0e}); {_CURE}"
        )
    return config


def _architecture(fields: _Fields) -> str:
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise fields.error("`architectures` must be a list with the model's class name")
    if names[0] not in ARCHITECTURES:
        name = _shown.repr(names[0])[1:-1]
        raise fields.error(f"architecture {name} is not supported (supported: {', '.join(ARCHITECTURES)})")
    if "quantization_config" in fields.raw:
        raise fields.error("quantised checkpoints are not supported; use the unquantised one")
    return str(names[0])


def _dtype(fields: _Fields) -> CheckpointDtype:
    value = fields.raw.get("dtype", fields.raw.get("torch_dtype"))
    if value is None:
        return "float32"
    for name in ("float32", "bfloat16", "float16"):
        if value in (name, f"torch.{name}"):
            return name
    raise fields.error(f"dtype {_shown.repr(value)} is not supported (float32, bfloat16, float16)")


def _rope(fields: _Fields, max_positions: int) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters` that holds both."""
    parameters = fields.raw.get("rope_parameters")
    key = "rope_parameters" if parameters is not None else "rope_scaling"
    scaling = fields.raw.get(key) or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise fields.error(f"`{key}` must be one object for all layers")
    inner = _Fields(scaling, f"{fields.where}: {key}")
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise fields.error(f"partial_rotary_factor {partial} is not supported (only 1)")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=inner.number("factor"))
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if high <= low:
            raise inner.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=inner.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=inner.size(
                "original_max_position_embeddings", max_positions, most=_MAX_CONTEXT
            ),
        )
    raise inner.error(f"rope type {_shown.repr(kind)} is not supported (default, linear, llama3)")


def _sliding_window(fields: _Fields, architecture: str) -> int | None:
    """Span of the layers that slide, None if none does. Only Mistral and Qwen have it; Qwen has a switch."""
    if architecture == "LlamaForCausalLM" or fields.raw.get("sliding_window") is None:
        return None
    if architecture != "MistralForCausalLM":
        if not fields.flag("use_sliding_window", False):
            return None
        layers = fields.size("num_hidden_layers", most=_MAX_LAYERS)
        first = fields.raw.get("max_window_layers", layers)
        if isinstance(first, int) and first >= layers:
            return None
    return fields.size("sliding_window")
