"""Weights: merged tensors, shards, and what is wrong with a checkpoint said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from server.errors import UserError
from server.models.config import ModelConfig
from server.models.decoder import CausalLM, build_model
from server.models.loading import fill_dummy_weights, load_weights

CONFIG = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=11,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=6,
    max_position_embeddings=16,
    qkv_bias=True,
)


def build(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> CausalLM:
    return build_model(config, device=torch.device("cpu"), dtype=dtype, max_positions=16)


def checkpoint() -> dict[str, torch.Tensor]:
    shapes = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.input_layernorm.weight": (8,), f"{layer}.post_attention_layernorm.weight": (8,)}
        for part, rows in (("q", 8), ("k", 4), ("v", 4)):
            shapes |= {
                f"{layer}.self_attn.{part}_proj.weight": (rows, 8),
                f"{layer}.self_attn.{part}_proj.bias": (rows,),
            }
        shapes |= {f"{layer}.self_attn.o_proj.weight": (8, 8), f"{layer}.mlp.down_proj.weight": (8, 6)}
        shapes |= {f"{layer}.mlp.gate_proj.weight": (6, 8), f"{layer}.mlp.up_proj.weight": (6, 8)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_merged_tensors_and_shards(tmp_path: Path) -> None:
    tensors = checkpoint()
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    weight_map = {name: file for file, own in shards.items() for name in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = build()
    seen: list[tuple[int, int]] = []
    filled = load_weights(model, tmp_path, lambda done, total: seen.append((done, total)))
    assert filled == 4 * CONFIG.num_parameters
    assert seen[-1] == (filled, filled)
    attention = model.model.layers[1].self_attn
    parts = [tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    torch.testing.assert_close(attention.qkv_proj.weight, torch.cat(parts), atol=0, rtol=0)
    biases = [tensors[f"model.layers.1.self_attn.{p}_proj.bias"] for p in "qkv"]
    torch.testing.assert_close(attention.qkv_proj.bias, torch.cat(biases), atol=0, rtol=0)


def test_casts_to_the_models_precision(tmp_path: Path) -> None:
    tensors = checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    model = build(dtype=torch.bfloat16)
    load_weights(model, tmp_path)
    expected = tensors["model.norm.weight"].bfloat16()
    torch.testing.assert_close(model.model.norm.weight, expected, atol=0, rtol=0)


def test_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    config = ModelConfig(**{f: getattr(CONFIG, f) for f in CONFIG.__struct_fields__} | {"tie_word_embeddings": True})
    tensors = checkpoint()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    for stored in (True, False):
        if not stored:
            del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        model = build(config)
        assert load_weights(model, tmp_path) == 4 * config.num_parameters
        torch.testing.assert_close(model.lm_head.weight, tensors["model.embed_tokens.weight"], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "has no tensor model.norm.weight"),
        ({"lm_head.weight": None, "model.norm.weight": None}, "lm_head.weight and 1 more"),
        ({"model.extra": torch.ones(1)}, "tensor model.extra has no place in a Qwen2ForCausalLM"),
        ({"model.norm.weight": torch.ones(9)}, r"model.norm.weight has shape \(9,\), but config.json implies \(8,\)"),
        ({"model.norm.weight": torch.ones(8, dtype=torch.int8)}, "holds torch.int8; quantised"),
    ],
)
def test_bad_checkpoint(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = {name: t for name, t in (checkpoint() | change).items() if t is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message) as caught:
        load_weights(build(), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", b"\xff" * 64])
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_weights(build(), tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(checkpoint(), file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_weights(build(), tmp_path)


def test_dummy_weights_are_seeded_and_complete() -> None:
    first, second, other = build(), build(), build()
    for model in (first, second, other):
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert fill_dummy_weights(first, 3) == 4 * CONFIG.num_parameters
    fill_dummy_weights(second, 3)
    fill_dummy_weights(other, 4)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert bool(a.isfinite().all())
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_weights_beyond_the_memory_of_the_machine_are_not_begun() -> None:
    """Linux promises each of the tensors, and kills a process when the weights fill them."""
    large = msgspec.structs.replace(CONFIG, num_layers=4096, hidden_size=8192, intermediate_size=65536, head_dim=4096)
    with pytest.raises(MemoryError, match=r"they take [\d,]+\.\d GiB, and this machine has [\d,]+\.\d$"):
        build(large)
