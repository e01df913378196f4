"""The decoder that all supported families share.

Llama, Mistral, Qwen2 and Qwen3 differ only in biases, q/k norm and rotary scaling, all of which `ModelConfig` says.
Module names follow Hugging Face's, but q/k/v and gate/up are merged into one matrix each.

`forward` has no branch on data and takes a flat batch of tokens, so Dynamo traces it once for any number of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from server.layers.activation import SiluAndMul
from server.layers.attention import Attention
from server.layers.linear import Embedding, Linear
from server.layers.norm import RMSNorm
from server.layers.rotary import RotaryEmbedding
from server.models.config import ModelConfig


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, name: str) -> None:
        super().__init__()
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        parts = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        self.qkv_proj = Linear(config.hidden_size, sum(parts.values()), bias=config.qkv_bias, parts=parts)
        self.o_proj = Linear(self.q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.rotary = rotary
        self.attn = Attention(
            f"{name}.attn", config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5
        )

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        q, k = self.rotary(positions, q, k)
        return self.o_proj(self.attn(q, k, v))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = Linear(config.hidden_size, sum(parts.values()), bias=config.mlp_bias, parts=parts)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(hidden)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, name: str) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, rotary, f"{name}.self_attn")
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual` is the stream before `hidden` is added to it; None in the first layer."""
        if residual is None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(nn.Module):
    """Embedding, layers and final norm: token ids and positions to hidden states."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        rotary = RotaryEmbedding(config.rope, config.head_dim, max_positions)
        self.layers = nn.ModuleList(DecoderLayer(config, rotary, f"model.layers.{i}") for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.run: Callable[[Decoder, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Kernels that cross the borders of layers, in the place of `forward`."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids (T,), positions (T,) -> (T, hidden)."""
        if self.run is not None:
            return self.run(self, input_ids, positions)
        hidden = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class CausalLM(nn.Module):
    """A decoder with its output head. Build it with `build_model`."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, max_positions)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids (T,), positions (T,) -> hidden states (T, hidden)."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (S, hidden) -> logits (S, vocab) in the model's precision."""
        return self.lm_head(hidden)

    def attention_layers(self) -> dict[str, Attention]:
        """Attention layers by name, first to last."""
        return {m.layer_name: m for m in self.modules() if isinstance(m, Attention)}


def build_model(config: ModelConfig, *, device: torch.device, dtype: torch.dtype, max_positions: int) -> CausalLM:
    """The model on `device` with uninitialised weights (see `server.models.loading`).

    `max_positions` is the longest context that will run; it sizes the rotary table. Raises MemoryError for weights
    that a CPU's machine could never hold: it would promise the memory, and kill somebody when the weights fill it.
    """
    if device.type == "cpu":
        needed, total = config.num_parameters * dtype.itemsize, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > total:
            raise MemoryError(f"they take {needed / 2**30:,.1f} GiB, and this machine has {total / 2**30:,.1f}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = CausalLM(config, max_positions)
    finally:
        torch.set_default_dtype(before)
    return model.eval()
