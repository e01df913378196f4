"""A GGUF file of the llama architecture to a Hugging Face checkpoint folder.

Needs the `gguf` package (extra `dev`) for reading and dequantising; names, layouts and the tokenizer are ours.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from server.errors import UserError

Progress = Callable[[int, int], None]
"""Called with tensors done and tensors in all."""

# Tensor names: llama.cpp's `LLAMA` map in gguf-py/gguf/tensor_mapping.py -> Hugging Face's.
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def check_available() -> None:
    """Raise UserError where the gguf package is missing: worth asking before a download."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("converting this model needs the gguf package: pip install gguf")


def convert(source: Path, target: Path, progress: Progress | None = None) -> None:
    """Write `config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json` and
    `tokenizer_config.json` (with the chat template) of GGUF file `source` into folder `target`.

    Weights are stored in bfloat16: the precision that such models are published in, finer than the quantised values it
    holds, and what both a CPU (widening to float32) and a GPU then run. UserError without the gguf package, or when the
    file holds something else than a llama with a byte-level BPE tokenizer.
    """
    check_available()
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture, tokenizer = fields.get("general.architecture"), fields.get("tokenizer.ggml.model")
    if architecture != "llama" or tokenizer != "gpt2":
        raise UserError(f"{source}: holds a {architecture} with a {tokenizer} tokenizer; only llama with gpt2 converts")
    config = model_config(fields, tied=all(t.name != "output.weight" for t in reader.tensors))
    tensors = {}
    for done, (name, values) in enumerate(dequantised(reader, config), start=1):
        tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
        if progress is not None:
            progress(done, len(reader.tensors))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", generation)
    _write_tokenizer(fields, target)


def dequantised(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face's name and float32 values of every tensor of a `GGUFReader`."""
    import gguf

    for tensor in reader.tensors:
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = _OUTER.get(tensor.name)
        if name is None:
            _, layer, part, kind = tensor.name.split(".")
            if part == "attn_q":
                values = undo_rotary_permutation(values, config["num_attention_heads"])
            elif part == "attn_k":
                values = undo_rotary_permutation(values, config["num_key_value_heads"])
            name = f"model.layers.{layer}.{_BLOCK[part]}.{kind}"
        yield name, values


def undo_rotary_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (heads * head_dim, n) from llama.cpp's order, rotated pairs side by side, to Hugging Face's, in two halves.

    The inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def model_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """`config.json` from a GGUF file's metadata."""
    epsilon = float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"])))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": epsilon,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    splitters: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if fields["tokenizer.ggml.pre"] == "smollm":
        # One token per digit, as in SmolLM's own tokenizer.json and llama.cpp's `smollm` pre-tokenizer.
        splitters.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
